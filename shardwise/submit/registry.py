"""The schedulers by name (`shardwise submit --on`). A scheduler is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from shardwise.submit.scheduler import Scheduler

SCHEDULERS = {"slurm": "shardwise.submit.slurm:Slurm"}
"""The class of each scheduler, as module:class."""


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler of this name."""
    module, _, kind = SCHEDULERS[name].partition(":")
    return cast(Scheduler, getattr(import_module(module), kind)())
