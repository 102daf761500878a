"""Rules of the drivers whose workers each have a whole model: a parameter server, and Hogwild."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from shardwise.drivers.driver import Driver

if TYPE_CHECKING:
    from shardwise.config import Layout, Model, Train


class WholeModels(Driver):
    """A driver whose workers are one device each, and whose ranks keep the weights in host memory."""

    lockstep = False
    ranks_on_host = True
    talks_while_saving = True
    runs_programs = False
    starts_own_processes = True


def splits_model(train: Train, layout: Layout, allowed: Collection[str] = ()) -> Iterator[str]:
    """Yield a problem if the layout has other keys than `data` and those that are `allowed`."""
    fields = type(layout).model_fields
    defaults = {key for key, value in layout.__dict__.items() if value == fields[key].default}
    if refused := sorted(layout.model_fields_set - defaults - {"data", *allowed}):
        yield (
            f"train.driver = {train.driver!r}: each of layout.data workers has a whole model; leave "
            f"layout.{', layout.'.join(refused)} out"
        )


def no_scales(train: Train) -> Iterator[str]:
    """Yield a problem for a precision whose scales all gradients of a step must share."""
    what = f"train.driver = {train.driver!r}"
    if train.precision == "float16":
        yield (
            f"{what}: float16 needs a loss scale that all gradients of a step agree on; use bfloat16 or "
            "float32"
        )
    if train.precision == "float8":
        yield f"{what}: float8 needs scales that all gradients of a step agree on; use bfloat16 or float32"


def no_experts(model: Model, train: Train) -> Iterator[str]:
    """Yield a problem if the model has experts."""
    if model.experts:
        yield (
            f"train.driver = {train.driver!r}: not with experts, whose loads are known to single workers "
            "alone"
        )
