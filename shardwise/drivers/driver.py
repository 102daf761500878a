"""What a driver is: the way in which the devices of a run work together.

A driver has two parts. `Driver` is what is known before anything starts: the settings, what does not go with
it, how many processes it needs, what the planner may assume. The job's schema, the planner, the command line
and the proof ask it, so it needs no torch. `RankDriver` is what it keeps and does on one rank while training:
where the gradients of a step come from, what follows an update, its part of a checkpoint.

The answers written here are those of synchronous training. A driver overrides what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.checkpoint import Manifest
    from shardwise.checkpoint.save import State
    from shardwise.config import Config, Layout, Train
    from shardwise.data import Dataset
    from shardwise.mesh import Worker
    from shardwise.optimizers import Optimizer
    from shardwise.plan import Plan
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.search.planner import Planner
    from shardwise.section import Section
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


Rule = Callable[..., Iterator[str]]
"""Gives the problems of a job, in words. Its parameters are the names of the tables that it needs."""


@dataclass(frozen=True)
class WorkerCounts:
    """How many workers a run has: on this machine, and over all machines the fewest and the most."""

    here: int
    least: int
    most: int


class LooseWorker(Protocol):
    """A worker that is no rank of a team, but computes for the ranks."""

    def work(self, worker: Worker, ranks: int, link: WorkerLink) -> bool:
        """Compute gradients for this many ranks. Return True if the run is done, and False if the ranks are
        gone or this worker is asked to stop."""


class Driver:
    """What is known of a driver before a run starts."""

    name: ClassVar[str]
    """What a job calls it."""
    summary: ClassVar[str]
    """What it does, for the description of `train.driver`."""
    settings: ClassVar[type[Section] | None] = None
    """Its own table of the job file, which has the driver's name; None: it has no settings."""
    settings_summary: ClassVar[str] = ""
    """What that table is about, in a few words."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What a job with this driver must fulfil."""
    refused_axes: ClassVar[Mapping[str, str]] = {}
    """Axes of the layout that must be 1, and why."""

    lockstep: ClassVar[bool] = True
    """Whether all devices make every step together. That is what the planner predicts and `verify` proves."""
    varies_rows: ClassVar[bool] = False
    """Whether a device may get another number of rows in each step: shapes change, and the order of sums."""
    is_predicted: ClassVar[bool] = True
    """Whether the planner's prediction of a step is written into the plan."""
    why_unsharded: ClassVar[str | None] = None
    """Why all ranks hold one and the same copy of the weights; None: every rank has its own."""
    ranks_on_host: ClassVar[bool] = False
    """Whether ranks keep weights in host memory and compute on CPUs, whatever devices there are."""
    workers_use_gpus: ClassVar[bool] = True
    """Whether there is one worker per GPU where the job does not say how many."""
    talks_while_saving: ClassVar[bool] = False
    """Whether ranks send each other messages while a checkpoint may be written in the background."""
    has_loose_workers: ClassVar[bool] = False
    """Whether there are workers that are no ranks, and come and go (`loose_worker`)."""
    starts_own_processes: ClassVar[bool] = False
    """Whether it cannot run in processes that torchrun or srun started."""
    resumes_missing: ClassVar[bool] = False
    """Whether it computes the sequences that a checkpoint lists as missing; else they are left out."""

    # Before the start

    def groups(self, config: Config) -> int:
        """Return how many groups of devices train by themselves."""
        return 1

    def sums_gradients(self, layout: Layout) -> bool:
        """Return whether gradients of several devices are summed; then they must be dense."""
        return layout.world > 1

    def problems_of_frozen(self, module: str, parameter: str) -> Iterator[str]:
        """Give what is wrong with a user's module that has a frozen parameter."""
        return iter(())

    def check_hosts(self, hosts: int) -> None:
        """Refuse a run on more hosts than the driver allows."""

    def check_worker_counts(self, config: Config, counts: WorkerCounts, least_given: int | None) -> None:
        """Refuse a number of workers, where `has_loose_workers`. `least_given` is what the command said."""

    def processes(
        self, config: Config, counts: WorkerCounts, first_host: bool
    ) -> tuple[Config, WorkerCounts]:
        """Return the job with nothing left open that depends on the number of workers, and how many processes
        there are: the workers, and what the driver starts beside them on the first host."""
        return config, counts

    def check_memory(self, config: Config, plan: Plan) -> None:
        """Refuse a job whose states do not fit into the memory of this host, where they are kept there."""

    def saved_numbers(self, plan: Plan) -> int:
        """Return how many numbers a checkpoint holds."""
        return plan.groups * plan.state_numbers

    # Plans

    def job_to_plan(self, config: Config) -> Config:
        """Return the job whose layout is planned: that of the ranks."""
        return config

    def first_plan(self, planner: Planner) -> Plan:
        """Return the plan on all devices; raise a `ConfigError` that says why there is none."""
        return planner.planned(planner.devices)

    def plan_on(self, planner: Planner, devices: int, least: int) -> Plan | None:
        """Return the plan for as many of these devices as can be used; None if that is fewer than `least`."""
        return planner.fitted(devices, least)

    def parts_of_batch(self, plan: Plan) -> int:
        """Return into how many parts the ranks split a global batch before the first step."""
        return plan.groups * plan.layout.data_parallel

    # The header of a run

    def describe_devices(self, training: Training, lines: dict[str, str]) -> dict[str, str]:
        """Return the lines about devices, layout and batch; `lines` are those of synchronous training."""
        return lines

    def describe_optimizer(self, config: Config, line: str) -> str:
        """Return the line about the optimizer; `line` is that of synchronous training."""
        return line

    def settings_without_effect(self, training: Training) -> list[str]:
        """Return which settings change nothing in this run, and why."""
        return []

    # While training

    def on_rank(self, training: Training) -> RankDriver:
        """Return what the driver does on this rank. Everything else of `training` is built."""
        raise NotImplementedError

    def loose_worker(self, config: Config, worker: Worker, dataset: Dataset) -> LooseWorker:
        """Return a worker that is no rank, where `has_loose_workers`."""
        raise AssertionError(f"every worker of the driver {self.name!r} is a rank")


class RankDriver:
    """What a driver keeps and does on one rank while training."""

    # A step

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return where the gradients of the steps come from. `link` tells whether the run is to stop."""
        raise NotImplementedError

    def hears_votes(self, step: int) -> bool:
        """Return whether all ranks tell each other in this step what they vote for."""
        return True

    def may_wait(self, step: int) -> bool:
        """Return whether this rank may have to wait in this step for ranks that are at another step."""
        return False

    def after_update(self, training: Training, votes: Tensor, again: Tensor) -> None:
        """Follow an update of the weights. `votes` is the sum of the votes that this rank heard, to be summed
        further; `again` says whether the step has to be made once more."""

    def evaluated_weights(self, training: Training) -> AbstractContextManager[object]:
        """Return a context in which the model has the weights that are evaluated."""
        return nullcontext()

    def rows(self, training: Training) -> str:
        """Return in words which rows of a global batch are this rank's."""
        rows = training.shares.of(training.mesh.data_index)
        return f"rows {rows.start} to {rows.stop - 1} of its global batch"

    # The first weights

    def draws_weights(self, training: Training) -> bool:
        """Return whether this rank draws first weights."""
        return True

    def begin(self, training: Training) -> None:
        """The weights have their first values: those drawn, or those of a pretrained model."""

    # Checkpoints

    @property
    def under_way(self) -> tuple[str, ...]:
        """The parameters that groups are exchanging now; a checkpoint names them."""
        return ()

    def groups_in_checkpoint(self, training: Training) -> int:
        """Return how many groups have weights and moments of their own in a checkpoint; 0: there are none."""
        return 0

    def state(self, training: Training, own: State) -> State:
        """Return all that this rank saves. `own` is the state of its model and its optimizer."""
        return own

    def state_to_fill(self, training: Training, own: State, manifest: Manifest) -> State:
        """Return the tensors that a checkpoint is loaded into."""
        return own

    def filled(self, training: Training, state: State, manifest: Manifest) -> None:
        """A checkpoint was loaded into this state."""

    def saved(self, training: Training) -> None:
        """The state was copied, and is written from the copy."""


def sums_gradients_only(train: Train, optimizer: Optimizer) -> Iterator[str]:
    """Refuse an optimizer whose momenta are summed by devices in lockstep."""
    if optimizer.summed_momentum is not None:
        yield (
            f"train.driver = {train.driver!r}: leave optimizer.name = {optimizer.name!r} out, which sums "
            "momenta in lockstep"
        )


def leave_out(what: str, section: str, table: Section, keys: Sequence[str], why: str = "") -> Iterator[str]:
    """Give the problem that some of these keys of a table have other values than their defaults."""
    given = [
        f"{section}.{key}" for key in keys if getattr(table, key) != type(table).model_fields[key].default
    ]
    if given:
        yield f"{what}: leave {' and '.join(given)} out{why}"
