"""The interface of a driver: the way in which the devices of a run work together.

A driver has two classes. `Driver` says what is known before a run starts: its settings, the jobs that it
refuses, how many processes it needs, what the planner may assume. The job's schema, the planner, the command
line and the proof use it, so it does not import torch. `RankDriver` is the part on one rank while training:
where the gradients of a step come from, what follows an update, its part of a checkpoint.

The defaults are those of synchronous training. A driver overrides what differs.
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
    from shardwise.plans import Plan
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.search.planner import Planner
    from shardwise.section import Section
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


Rule = Callable[..., Iterator[str]]
"""Takes tables of a job, which its parameters name, and yields a message for each problem in them."""


@dataclass(frozen=True)
class WorkerCounts:
    """How many workers a run has."""

    here: int
    """Number of workers on this machine."""
    least: int
    """Smallest number of workers on all machines together."""
    most: int
    """Largest number of workers on all machines together."""


class LooseWorker(Protocol):
    """A worker that computes for the ranks of a team, and is not a rank itself."""

    def work(self, worker: Worker, ranks: int, link: WorkerLink) -> bool:
        """Compute gradients for this many ranks. Return True when the run is done, and False when the ranks
        are gone or this worker is asked to stop."""


class Driver:
    """What is known about a driver before a run starts."""

    name: ClassVar[str]
    """The value of `train.driver` that selects it."""
    summary: ClassVar[str]
    """What the driver does, for the description of `train.driver`."""
    settings: ClassVar[type[Section] | None] = None
    """Class of the driver's table in a job, which is named like the driver; None: it has no settings."""
    settings_summary: ClassVar[str] = ""
    """Description of that table in a few words."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Checks of the jobs with this driver."""
    refused_axes: ClassVar[Mapping[str, str]] = {}
    """Axes of the layout whose degree must be 1, and why."""

    lockstep: ClassVar[bool] = True
    """Whether all devices make every step together, as the planner assumes and `verify` can prove."""
    varies_rows: ClassVar[bool] = False
    """Whether a device may get another number of rows in each step, so that shapes vary."""
    is_predicted: ClassVar[bool] = True
    """Whether the plan contains the planner's prediction of a step."""
    why_unsharded: ClassVar[str | None] = None
    """Why all ranks share one copy of the weights; None: every rank has its own."""
    ranks_on_host: ClassVar[bool] = False
    """Whether ranks keep weights in host memory and compute on CPUs, even if there are GPUs."""
    workers_use_gpus: ClassVar[bool] = True
    """Whether there is one worker per GPU by default."""
    talks_while_saving: ClassVar[bool] = False
    """Whether ranks send each other messages while a checkpoint may be written in the background."""
    has_loose_workers: ClassVar[bool] = False
    """Whether there are workers that are not ranks (`loose_worker`). They may join and leave at any time."""
    runs_programs: ClassVar[bool] = True
    """Whether gradients can come from a program (`run.program`)."""
    starts_own_processes: ClassVar[bool] = False
    """Whether it needs shardwise's own launcher, and cannot run under torchrun or srun."""
    resumes_missing: ClassVar[bool] = False
    """Whether a resumed run computes the sequences that a checkpoint lists as missing, or omits them."""

    # Before the start

    def groups(self, config: Config) -> int:
        """Return the number of groups of devices that train independently of each other."""
        return 1

    def sums_gradients(self, layout: Layout) -> bool:
        """Return whether gradients of several devices are summed, which requires dense gradients."""
        return layout.world > 1

    def problems_of_frozen(self, module: str, parameter: str) -> Iterator[str]:
        """Yield a message if this driver refuses a user's module because it has this frozen parameter."""
        return iter(())

    def check_hosts(self, hosts: int) -> None:
        """Refuse a run on more hosts than the driver allows."""

    def check_worker_counts(self, config: Config, counts: WorkerCounts, least_given: int | None) -> None:
        """Refuse wrong numbers of workers. Called if `has_loose_workers`. `least_given` is --min-workers."""

    def processes(
        self, config: Config, counts: WorkerCounts, first_host: bool
    ) -> tuple[Config, WorkerCounts]:
        """Return the job with all settings filled in that depend on the number of workers, and the numbers of
        processes: the workers, and what the driver starts in addition on the first host."""
        return config, counts

    def check_memory(self, config: Config, plan: Plan) -> None:
        """Refuse a job whose states, if they are kept in host memory, do not fit there."""

    def saved_numbers(self, plan: Plan) -> int:
        """Return how many numbers a checkpoint contains."""
        return plan.groups * plan.state_numbers

    # Plans

    def job_to_plan(self, config: Config) -> Config:
        """Return the job of the ranks, for which the layout is planned."""
        return config

    def first_plan(self, planner: Planner) -> Plan:
        """Return the plan on all devices, or raise a `ConfigError` that says why there is none."""
        return planner.planned(planner.devices)

    def plan_on(self, planner: Planner, devices: int, least: int) -> Plan | None:
        """Return the plan on as many of these devices as can be used; None if that is fewer than `least`."""
        return planner.fitted(devices, least)

    def parts_of_batch(self, plan: Plan) -> int:
        """Return the number of equal parts in which the ranks first split a global batch."""
        return plan.groups * plan.layout.data_parallel

    # The header of a run

    def describe_devices(self, training: Training, lines: dict[str, str]) -> dict[str, str]:
        """Return the lines about devices, layout and batch; `lines` are those of synchronous training."""
        return lines

    def describe_optimizer(self, config: Config, line: str) -> str:
        """Return the line about the optimizer; `line` is that of synchronous training."""
        return line

    def settings_without_effect(self, training: Training) -> list[str]:
        """Return a sentence for each setting that has no effect in this run."""
        return []

    # While training

    def on_rank(self, training: Training) -> RankDriver:
        """Return the driver's part on this rank. Everything else in `training` is already built."""
        raise NotImplementedError

    def loose_worker(self, config: Config, worker: Worker, dataset: Dataset) -> LooseWorker:
        """Return a worker that is not a rank. Called if `has_loose_workers`."""
        raise AssertionError(f"every worker of the driver {self.name!r} is a rank")


class RankDriver:
    """The part of a driver on one rank while training."""

    # A step

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return the source of the gradients. `link` tells it whether the run is asked to stop."""
        raise NotImplementedError

    def hears_votes(self, step: int) -> bool:
        """Return whether the votes of all ranks are summed in this step."""
        return True

    def may_wait(self, step: int) -> bool:
        """Return whether this rank may have to wait in this step for ranks that are at an earlier step."""
        return False

    def after_update(self, training: Training, votes: Tensor, again: Tensor) -> None:
        """Called after every update of the weights. `votes` is the sum of the votes so far, which the driver
        may sum over further ranks in place. `again` is true if the step has to be repeated."""

    def evaluated_weights(self, training: Training) -> AbstractContextManager[object]:
        """Return a context in which the model has the weights to evaluate."""
        return nullcontext()

    def rows(self, training: Training) -> str:
        """Return a phrase that says which rows of a global batch this rank computes."""
        rows = training.shares.of(training.mesh.data_index)
        return f"rows {rows.start} to {rows.stop - 1} of its global batch"

    # The first weights

    def draws_weights(self, training: Training) -> bool:
        """Return whether this rank draws the initial weights."""
        return True

    def weights_ready(self, training: Training) -> None:
        """Called when the weights have their initial values: drawn ones, or those of a pretrained model."""

    # Checkpoints

    @property
    def under_way(self) -> tuple[str, ...]:
        """The parameters that groups are exchanging now, which a checkpoint lists."""
        return ()

    def groups_in_checkpoint(self, training: Training) -> int:
        """Return how many groups save weights and moments of their own; 0: the run has no groups."""
        return 0

    def state(self, training: Training, own: State) -> State:
        """Return everything that this rank saves. `own` is the state of its model and its optimizer."""
        return own

    def state_to_fill(self, training: Training, own: State, manifest: Manifest) -> State:
        """Return the tensors that a checkpoint is loaded into."""
        return own

    def state_loaded(self, training: Training, state: State, manifest: Manifest) -> None:
        """Called after a checkpoint was loaded into `state`."""

    def state_copied(self, training: Training) -> None:
        """Called when a save has copied the state, so that training may change it."""


def sums_gradients_only(train: Train, optimizer: Optimizer) -> Iterator[str]:
    """Yield a problem if devices would sum the optimizer's momenta, which only lockstep allows."""
    if optimizer.summed_momentum is not None:
        yield (
            f"train.driver = {train.driver!r}: leave optimizer.name = {optimizer.name!r} out, which sums "
            "momenta in lockstep"
        )


def leave_out(what: str, section: str, table: Section, keys: Sequence[str], why: str = "") -> Iterator[str]:
    """Yield a problem if some of these keys of a table differ from their defaults."""
    changed = [
        f"{section}.{key}" for key in keys if getattr(table, key) != type(table).model_fields[key].default
    ]
    if changed:
        yield f"{what}: leave {' and '.join(changed)} out{why}"
