"""The transformer of examples/own_model.py on a simulated device: each row takes a fixed time, and one
worker takes longer.

Workers sleep for this time, so that four workers on two cores do not slow each other down. The environment
variable UNEVEN_SLOW names a file with the process id of the slow worker and its factor.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SECONDS_A_ROW = 0.05
_spec = importlib.util.spec_from_file_location(
    "own_model", Path(__file__).parents[1] / "examples" / "own_model.py"
)
assert _spec is not None
assert _spec.loader is not None
own_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(own_model)


class Uneven(own_model.OwnModel):  # type: ignore[misc,name-defined]
    """Computes what it always computes, after a while."""

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(len(tokens) * SECONDS_A_ROW * _slowness())
        result: Tensor = super().forward(tokens, *args, **kwargs)
        return result


def _slowness() -> float:
    try:
        process, factor = Path(os.environ["UNEVEN_SLOW"]).read_text().split()
    except (OSError, ValueError):
        return 1.0
    return float(factor) if int(process) == os.getpid() else 1.0
