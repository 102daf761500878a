"""shardwise plans, proves and runs distributed training of transformer models on PyTorch.

The names below are the Python library (docs/library.md); everything else is private. They are imported when
they are first used, so `import shardwise` takes a few milliseconds and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise.errors import RunFailed, UserError
    from shardwise.library.functions import drill, launch, plan, verify
    from shardwise.library.job import Job
    from shardwise.library.results import Drill, PlanAnswer, Proof, Run

__all__ = [
    "Drill",
    "Job",
    "PlanAnswer",
    "Proof",
    "Run",
    "RunFailed",
    "UserError",
    "__version__",
    "drill",
    "launch",
    "plan",
    "verify",
]

_HOMES = {
    "errors": ("RunFailed", "UserError"),
    "library.functions": ("drill", "launch", "plan", "verify"),
    "library.job": ("Job",),
    "library.results": ("Drill", "PlanAnswer", "Proof", "Run"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"shardwise.{home}"), name)
            return value
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
