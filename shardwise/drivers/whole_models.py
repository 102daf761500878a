"""Rules of the drivers whose workers have a whole model each: a parameter server, and Hogwild."""

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
    starts_own_processes = True


def splits_model(train: Train, layout: Layout, allowed: Collection[str] = ()) -> Iterator[str]:
    """Give the keys of the layout that would split a model; `allowed` are those that may be given."""
    usual = {key for key, value in layout.__dict__.items() if value == type(layout).model_fields[key].default}
    if given := sorted(layout.model_fields_set - usual - {"data", *allowed}):
        yield (
            f"train.driver = {train.driver!r}: each of layout.data workers has a whole model; leave "
            f"layout.{', layout.'.join(given)} out"
        )


def no_scales(train: Train) -> Iterator[str]:
    """Give what needs numbers that all gradients of a step agree on."""
    what = f"train.driver = {train.driver!r}"
    if train.precision == "float16":
        yield (
            f"{what}: float16 needs a loss scale that all gradients of a step agree on; use bfloat16 or "
            "float32"
        )
    if train.precision == "float8":
        yield f"{what}: float8 needs scales that all gradients of a step agree on; use bfloat16 or float32"


def no_experts(model: Model, train: Train) -> Iterator[str]:
    """Give that a model with experts does not go with such workers."""
    if model.experts:
        yield (
            f"train.driver = {train.driver!r}: not with experts, whose loads are known to single workers "
            "alone"
        )
