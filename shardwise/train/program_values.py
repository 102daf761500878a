"""Values that pass between a program and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.data.batches import Batch
from shardwise.data.samples import MicroBatch
from shardwise.errors import UserError
from shardwise.models import IGNORED

STEP_NUMBERS = ("gradient_norm", "items", "learning_rate", "loss", "seconds", "step", "time", "tokens")
"""Numbers that shardwise records for each step. Losses of a program have other names, but for a single loss,
which is named `loss`."""
EVENT_FIELDS = ("event", "name", "step", "time")
"""Names that no number of `Engine.log` may have, because numbers that are logged after the last step are the
fields of an event."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """This worker's samples of one global batch, which `Engine.forward_backward` takes."""

    micro_batches: Sequence[MicroBatch] | Sequence[Batch]
    """The samples that are computed at once, one after the other."""


def next_token_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of predicting each next token of the job's data, and the number of targets. The
    model's `forward(inputs, targets)` returns that sum."""
    return model(batch["inputs"], batch["targets"]), (batch["targets"] != IGNORED).sum()


class Metrics(Mapping[str, float]):
    """Numbers of a step, known after `Engine.optim_step`."""

    def __init__(self) -> None:
        self._values: dict[str, float] | None = None

    def _known(self) -> dict[str, float]:
        if self._values is None:
            raise UserError(
                "the numbers of a step are known after engine.optim_step(), which sums over workers"
            )
        return self._values

    def __getitem__(self, name: str) -> float:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def fill(self, values: dict[str, float]) -> None:
        """Set the numbers, which the program can read from now on."""
        self._values = values

    def __repr__(self) -> str:
        return (
            "Metrics(known after engine.optim_step())" if self._values is None else f"Metrics({self._values})"
        )


def check_names_of_losses(names: Sequence[str], step: int) -> None:
    """Raise if a loss has the name of another number of a step, which it would hide."""
    taken = [name for name in names if name in STEP_NUMBERS]
    if taken and list(names) != ["loss"]:
        raise UserError(
            f"step {step}: the loss function named a loss {taken[0]!r}, and each step has a number of this "
            f"name already; choose another name, for example '{taken[0]}_term'"
        )


def check_logged_names(names: Iterable[str]) -> None:
    """Raise if a number that a program logs has the name of something that each event has."""
    for name in names:
        if name in EVENT_FIELDS:
            raise UserError(
                f"engine.log({name}=…): each event has something of this name already; choose another "
                f"name, for example {name}_of_program"
            )
