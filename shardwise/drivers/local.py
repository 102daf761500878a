"""Groups of devices that train independently and exchange weights now and then: local SGD, and DiLoCo.

Each group has the whole layout, its own rows of every global batch, and its own optimizer. After every
`local.sync_every` steps an outer optimizer makes a step by the mean change of all groups
(drivers/outer_optimizer.py), and all groups continue from the result, the *anchor*. It is the model of the
run. Groups send each other nothing between two exchanges, so they decide together to stop or to save only
when they exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shardwise.drivers.driver import Driver, leave_out, sums_gradients_only
from shardwise.drivers.synchronous import OwnRowsRank
from shardwise.errors import ConfigError
from shardwise.plurals import counted
from shardwise.section import Degree, NonNegative, Positive, Section

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.checkpoint import Manifest
    from shardwise.checkpoint.save import State
    from shardwise.config import Config, Layout, Recovery, Train
    from shardwise.drivers.outer_optimizer import OuterOptimizer
    from shardwise.plans import Plan
    from shardwise.search.planner import Planner
    from shardwise.train.build import Training


class LocalSettings(Section):
    """Groups that train by themselves and exchange weights now and then (`train.driver = "local"`); the
    layout is that of one group."""

    groups: Degree = Field(
        2,
        description="number of groups; each has the whole layout, so 2 groups with layout.data = 2 are 4 "
        "workers",
    )
    sync_every: Positive = Field(50, description="steps between two exchanges")
    learning_rate: float = Field(
        0.7,
        gt=0,
        description="learning rate of the outer optimizer, whose gradient is the mean change of all groups; "
        "1 with `momentum = 0`: the groups are averaged",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimizer")
    fragments: Positive = Field(
        1, description="parts of the model that are exchanged in turn, evenly over `sync_every` steps"
    )
    overlap: NonNegative = Field(0, description="steps that groups make during an exchange")
    compression: Literal["bfloat16", "float16", "float8", "int8", "int4"] | None = Field(
        None, description="codec of the changes that groups exchange; left out: no compression"
    )


def local_settings(config: Config) -> LocalSettings:
    """Return the table `[local]` of a job."""
    table = getattr(config, LocalGroups.name)
    assert isinstance(table, LocalSettings), "the schema made it"
    return table


def _cut(train: Train, local: LocalSettings) -> Iterator[str]:
    from shardwise.config import divisors

    if train.global_batch % local.groups:
        yield (
            f"local.groups = {local.groups}: does not divide train.global_batch = {train.global_batch}; use "
            f"one of {', '.join(map(str, divisors(train.global_batch)))}"
        )
    each = local.sync_every // local.fragments
    if local.sync_every % local.fragments:
        yield (
            f"local.fragments = {local.fragments}: does not divide local.sync_every = {local.sync_every}; "
            f"use one of {', '.join(map(str, divisors(local.sync_every)))}"
        )
    elif local.overlap >= each:
        yield (
            f"local.overlap = {local.overlap}: an exchange has to be over before the next begins, after "
            f"{each} steps; use at most {each - 1}"
        )


def _numbers(train: Train) -> Iterator[str]:
    what = "train.driver = 'local'"
    if train.precision == "float16":
        yield (
            f"{what}: float16 needs a loss scale that all devices agree on in each step; use bfloat16 or "
            "float32"
        )
    if train.state_dtype == "bfloat16":
        yield f"{what}: groups move by less than bfloat16 can tell; leave train.state_dtype out"


def _layout(layout: Layout) -> Iterator[str]:
    what = "train.driver = 'local'"
    if layout.offload:
        yield f"{what}: groups exchange what is on the devices; leave layout.offload out"
    exchanged = "; what groups exchange is local.compression"
    yield from leave_out(what, "layout", layout, ("compression", "weight_compression"), exchanged)


def _copies(recovery: Recovery) -> Iterator[str]:
    if recovery.copies:
        yield "recovery.copies: not with train.driver = 'local', whose groups differ; leave it out"


class LocalGroups(Driver):
    """Groups of devices train by themselves and exchange weights now and then."""

    name = "local"
    summary = "groups of devices that train by themselves and exchange weights now and then"
    settings = LocalSettings
    settings_summary = "groups that train by themselves"
    rules = (_cut, _numbers, sums_gradients_only, _layout, _copies)
    lockstep = False

    def groups(self, config: Config) -> int:
        """Return the number of groups in the job's settings."""
        return local_settings(config).groups

    def saved_numbers(self, plan: Plan) -> int:
        """Return the numbers of the groups' states, of the anchor, which is saved as the model, and of its
        momentum."""
        return super().saved_numbers(plan) + plan.parameters + (plan.parameters - plan.frozen)

    def first_plan(self, planner: Planner) -> Plan:
        """Return the plan of one group on its part of all devices."""
        return _plan_groups(planner, self.groups(planner.config), planner.devices)

    def plan_on(self, planner: Planner, devices: int, least: int) -> Plan | None:
        """Return the plan of the largest number of groups that fits on these devices and divides the batch.
        Each group has the size that it has in the first plan."""
        size = planner.first.layout.world
        for groups in range(devices // size, 0, -1):
            if planner.config.train.global_batch % groups == 0 and groups * size >= least:
                with suppress(ConfigError):
                    return _plan_groups(planner, groups, groups * size)
        return None

    def describe_optimizer(self, config: Config, line: str) -> str:
        """Return the line, followed by how often all groups make an outer step."""
        every = local_settings(config).sync_every
        return f"{line}; an outer step of all groups every {'step' if every == 1 else counted(every, 'step')}"

    def on_rank(self, training: Training) -> LocalRank:
        """Return a rank of one group with its outer optimizer."""
        from shardwise.drivers.outer_optimizer import OuterOptimizer
        from shardwise.parallel import build_plain

        config, layout = training.config, training.plan.layout
        sizes = {
            name: parameter.numel()
            for name, parameter in build_plain(training.plan.model).named_parameters()
            if parameter.requires_grad
        }
        same_on = "data" if not layout.zero and layout.expert == 1 else None
        settings, last = local_settings(config), config.train.steps
        return LocalRank(OuterOptimizer(training.parallel, training.comm, settings, last, sizes, same_on))


def _plan_groups(planner: Planner, groups: int, devices: int) -> Plan:
    """Return the plan of one group, for its part of the batch and of the devices."""
    from shardwise.plans import choose

    config = planner.config
    if devices % groups:
        on = counted(devices, "device")
        raise ConfigError(f"the job on {on}", [f"local.groups = {groups}: does not divide {on}"])
    train = config.train.model_copy(update={"global_batch": config.train.global_batch // groups})
    job = config.model_copy(update={"train": train})
    return replace(choose(job, devices // groups, planner.memory_bytes, planner.parameters), groups=groups)


class LocalRank(OwnRowsRank):
    """A rank of one group: it trains on the group's rows, and exchanges weights with its peers in the other
    groups."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer

    @property
    def under_way(self) -> tuple[str, ...]:
        """Names of the parameters that groups are exchanging now."""
        return self.outer.under_way

    def hears_votes(self, step: int) -> bool:
        """Return whether groups exchange weights, and with them votes, after this step."""
        return self.outer.exchanges_after(step)

    def may_wait(self, step: int) -> bool:
        """Return whether an exchange begins or ends after this step, so that this group may wait for the
        slowest."""
        return self.outer.waits_in(step)

    def after_update(self, training: Training, votes: Tensor, again: Tensor) -> None:
        """Exchange weights if an exchange begins or ends after this step.

        Each group has its own float8 scales, so one group may have to repeat its step while the others wait
        for it. It takes part in the exchange only after the repetition. So the host has to read `again` from
        the device here.
        """
        step = training.step + 1
        if not self.outer.waits_in(step) or (training.parallel.scales is not None and bool(again)):
            return
        if self.outer.exchanges_after(step):
            training.comm.all_reduce(votes, "group")
        self.outer.after(step)

    @contextmanager
    def evaluated_weights(self, training: Training) -> Iterator[None]:
        """Return a context in which the model has the anchor's weights. Afterwards it has the weights of the
        group again, and in float8 their scales."""
        with self.outer.anchor_in_model():
            yield
        if training.parallel.scales is not None:
            training.parallel.scales.begin()

    def weights_ready(self, training: Training) -> None:
        """Set the anchor of the outer optimizer to the first weights."""
        self.outer.reset_anchor()

    def groups_in_checkpoint(self, training: Training) -> int:
        """Return the number of groups, each of which saves its own state."""
        return training.plan.groups

    def state(self, training: Training, own: State) -> State:
        """Return the state of this rank's group and of the outer optimizer."""
        return self.outer.state(own, training.mesh.coordinate("group"))

    def state_to_fill(self, training: Training, own: State, manifest: Manifest) -> State:
        """Return the tensors to load. If the checkpoint has fewer groups than this run, several groups load
        the state of the same group."""
        if not manifest.groups:
            return own
        group = training.mesh.coordinate("group") % manifest.groups
        return self.outer.state_to_fill(own, group, manifest.under_way)

    def state_loaded(self, training: Training, state: State, manifest: Manifest) -> None:
        """Continue the exchange that a checkpoint contains. If it is of a run without groups, its weights
        become the anchor."""
        if not manifest.groups:
            self.outer.reset_anchor()
            return
        group = training.mesh.coordinate("group") % manifest.groups
        self.outer.state_loaded(state, group, manifest.under_way)
