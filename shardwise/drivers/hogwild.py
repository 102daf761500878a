"""Hogwild! (Niu et al. 2011): processes of one host update one copy of the weights without a lock.

A worker makes an update with every micro-batch, directly in memory that all workers share (lock_free.py).
After a global batch all workers wait for each other, to record the step, to evaluate and to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from shardwise.drivers.driver import RankDriver, sums_gradients_only
from shardwise.drivers.whole_models import WholeModels, no_experts, no_scales, splits_model
from shardwise.errors import UserError
from shardwise.optimizers import BUILT_IN, Optimizer
from shardwise.section import Section

if TYPE_CHECKING:
    from shardwise.asynchronous.shared_memory import SharedState
    from shardwise.config import Config, Layout, Recovery, Train
    from shardwise.plans import Plan
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


class HogwildSettings(Section):
    """Updates of shared weights without a lock (`train.driver = "hogwild"`), on the CPUs of one host."""

    locked: bool = Field(False, description="make one update at a time, to measure what a lock costs")


def hogwild_settings(config: Config) -> HogwildSettings:
    """Return the table `[hogwild]` of a job."""
    table = getattr(config, Hogwild.name)
    assert isinstance(table, HogwildSettings), "the schema made it"
    return table


def _layout(train: Train, layout: Layout) -> Iterator[str]:
    yield from splits_model(train, layout, allowed={"zero"} if layout.zero == 0 else ())


def _lock_free(optimizer: Optimizer) -> Iterator[str]:
    if optimizer.summed_momentum is None and not optimizer.lock_free:
        able = ", ".join(name for name, kind in BUILT_IN.items() if kind.lock_free)
        yield (
            f"train.driver = 'hogwild': optimizer.name = {optimizer.name!r} cannot update weights without a "
            f"lock; use one of {able}"
        )


def _whole_states(train: Train) -> Iterator[str]:
    why = "updates of single rows are smaller than bfloat16 can tell"
    if train.state_dtype == "bfloat16":
        yield f"train.driver = 'hogwild': {why}; leave train.state_dtype out"


def _copies(recovery: Recovery) -> Iterator[str]:
    if recovery.copies:
        yield (
            "recovery.copies: not with train.driver = 'hogwild', whose workers have one memory; leave it out"
        )


class Hogwild(WholeModels):
    """Processes of one host update shared weights without a lock."""

    name = "hogwild"
    summary = "processes of one host that update shared weights without a lock, once in each micro-batch"
    settings = HogwildSettings
    settings_summary = "updates without a lock"
    rules = (_layout, no_scales, sums_gradients_only, _lock_free, _whole_states, no_experts, _copies)
    is_predicted = False
    why_unsharded = "workers share one memory"
    workers_use_gpus = False

    def sums_gradients(self, layout: Layout) -> bool:
        """Return False: each worker applies its own gradients."""
        return False

    def check_hosts(self, hosts: int) -> None:
        """Refuse several hosts, because workers share the memory of one."""
        if hosts > 1:
            raise UserError(
                f"train.driver = 'hogwild': workers share the memory of one host, and this run has {hosts}; "
                "use 'server'"
            )

    def check_memory(self, config: Config, plan: Plan) -> None:
        """Refuse a job whose weights and states do not fit into the free memory of this host."""
        import psutil

        from shardwise.mesh import machine_memory
        from shardwise.units import GIB

        needed = plan.state_width * plan.state_numbers
        free = min(float(psutil.virtual_memory().available), machine_memory())
        if needed > free:
            raise UserError(
                f"train.driver = 'hogwild': weights and optimizer states take {needed / GIB:,.1f} GiB of "
                f"this machine's memory, of which {free / GIB:,.1f} GiB are free; use a smaller model, or "
                "train.driver = 'server' with several server.servers"
            )

    def describe_devices(self, training: Training, lines: dict[str, str]) -> dict[str, str]:
        """Return the lines with a note on whether updates use a lock."""
        locked = hogwild_settings(training.config).locked
        how = "under a lock" if locked else "without a lock"
        return {**lines, "batch": f"{lines['batch']}, each an update {how}"}

    def settings_without_effect(self, training: Training) -> list[str]:
        """Return a note if this machine has GPUs, which workers do not use."""
        from shardwise.mesh import local_gpus

        if not local_gpus():
            return []
        return ["GPUs: workers share the memory of the host, and compute on its CPUs"]

    def on_rank(self, training: Training) -> HogwildRank:
        """Return a rank whose weights and moments are in shared memory."""
        from shardwise.asynchronous.shared_memory import SharedState

        named = list(training.parallel.named_parameters())
        return HogwildRank(SharedState(named, training.optimizer, training.peers))


class HogwildRank(RankDriver):
    """A worker whose weights and moments are in the memory that all workers share."""

    def __init__(self, shared: SharedState) -> None:
        self.shared = shared

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return a source that updates the shared weights with each micro-batch."""
        from shardwise.drivers.lock_free import LockFree

        return LockFree(training, self.shared, hogwild_settings(training.config).locked)

    def draws_weights(self, training: Training) -> bool:
        """Return whether this is the first worker, which draws the weights for all."""
        return training.peers.rank == 0

    def weights_ready(self, training: Training) -> None:
        """Wait until all workers have the initial weights, before any worker changes them."""
        training.peers.all_gather("has weights")

    def state_copied(self, training: Training) -> None:
        """Wait until all workers have copied their state, before any worker changes the weights."""
        training.peers.all_gather("has its copy")
