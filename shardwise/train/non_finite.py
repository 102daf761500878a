"""A step whose loss or gradient is not finite: the loss scale is lowered, or the run ends.

The update has not changed the weights, because the device detected the number before (train/steps.py).
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from shardwise.checkpoint.state_key import split_scale_name
from shardwise.config import RANK_AXES
from shardwise.errors import RunFailed
from shardwise.optim import first_non_finite
from shardwise.parallel import build_plain
from shardwise.train.build import Training
from shardwise.train.float8_check import not_finite
from shardwise.train.record import Numbers


def overflowed(training: Training, numbers: Numbers) -> bool:
    """Return whether a number of the step was not finite. Raise if a smaller loss scale would not help."""
    loss, hidden = numbers.shared.loss, not_finite(numbers.scaled)
    if math.isfinite(numbers.norm) and math.isfinite(loss) and not hidden:
        return False
    # The loss itself is not scaled, and a scale below 1 would not help.
    hopeless = not math.isfinite(loss) or training.scale.value <= 1
    if hopeless or not training.scale.dynamic:
        _stop(training, loss, hidden)
    return True


def _stop(training: Training, loss: float, hidden: list[int]) -> NoReturn:
    """Raise an error that names the first parameter of the model, over all ranks, whose gradient is not
    finite."""
    names = [name for name, _ in build_plain(training.plan.model).named_parameters()]
    mine = first_non_finite(training.parallel.named_parameters())
    index = torch.tensor(names.index(mine) if mine else len(names), device=training.mesh.device)
    for axis in RANK_AXES:
        training.comm.all_reduce(index, axis, op=torch.distributed.ReduceOp.MIN)
    name = names[int(index)] if int(index) < len(names) else None
    gradient = (
        f"the gradient of {name} is the first that is not finite" if name else "all gradients are finite"
    )
    if hidden and training.parallel.scales is not None:
        module, kind = split_scale_name(training.parallel.scales.names[hidden[0]])
        gradient += f", but not the {kind} of the float8 product of {module}"
    raise RunFailed(
        f"step {training.step + 1}: the loss is {loss} and {gradient}. The weights were not touched, and "
        "checkpoints are kept. Lower train.learning_rate, add warm-up, or look at the data of this step, and "
        "run the command again."
    )
