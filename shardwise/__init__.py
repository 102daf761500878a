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
    from shardwise.plans.sharding import (
        Sharding,
        columns,
        experts,
        gathered,
        positions,
        rows,
        vocabulary,
        whole,
    )
    from shardwise.train.engine import Engine
    from shardwise.train.program_values import Metrics, StepBatch, next_token_loss

__all__ = [
    "Drill",
    "Engine",
    "Job",
    "Metrics",
    "PlanAnswer",
    "Proof",
    "Run",
    "RunFailed",
    "Sharding",
    "StepBatch",
    "UserError",
    "__version__",
    "columns",
    "drill",
    "experts",
    "gathered",
    "launch",
    "next_token_loss",
    "plan",
    "positions",
    "rows",
    "verify",
    "vocabulary",
    "whole",
]

_HOMES = {
    "errors": ("RunFailed", "UserError"),
    "library.functions": ("drill", "launch", "plan", "verify"),
    "library.job": ("Job",),
    "library.results": ("Drill", "PlanAnswer", "Proof", "Run"),
    "plans.sharding": (
        "Sharding",
        "columns",
        "experts",
        "gathered",
        "positions",
        "rows",
        "vocabulary",
        "whole",
    ),
    "train.engine": ("Engine",),
    "train.program_values": ("Metrics", "StepBatch", "next_token_loss"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"shardwise.{home}"), name)
            return value
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
