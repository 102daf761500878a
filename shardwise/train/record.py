"""The record of a step: the numbers that the host reads from the device, and the `StepRecord` made from them.

The numbers of a step are concatenated on the device and read once. The training loop waits for the device
nowhere else, but expert parallelism does, in each layer (parallel/expert.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.drivers.registry import driver_of
from shardwise.mesh import nccl
from shardwise.observe import EXPOSED, AxisTimes, axis_times, peak_memory, present_time
from shardwise.plans.learning_rate import learning_rate
from shardwise.resilience.stragglers import StragglerChange, StragglerWatch
from shardwise.train.build import Training
from shardwise.train.float8_check import by_layer
from shardwise.train.step_gradients import StepGradients, Updates
from shardwise.train.step_sums import Shared, StepSums


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did. Numbers are the same on every rank; spans and collectives are those of
    this rank."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    spans: dict[str, float]
    collectives: dict[str, dict[str, int]]
    communication: AxisTimes
    """How long each axis was communicating, and how much of that was hidden; empty on a GPU."""
    memory_bytes: int
    loss_scale: float
    skipped: bool
    stop: bool
    save: bool
    """Whether the main rank's clock says that a save is due."""
    data: str
    """A checksum of the sequences of the global batch, 14 hexadecimal digits: the same on every layout."""
    ended: float
    """When the step was done, in seconds since 1970."""
    rank_seconds: tuple[tuple[float, float], ...] = ()
    """(compute, data) seconds of each rank in the step before, without waits; empty after the first step and
    on one device."""
    rows: tuple[int, ...] = ()
    """Number of rows of each data-parallel device, if these numbers differ from step to step."""
    staleness: tuple[int, ...] = ()
    """Staleness of each gradient in the sum, if workers of a parameter server computed them."""
    dropped: int = 0
    """Number of gradients that were dropped because another of the same portion came first."""
    updates: Updates | None = None
    """Updates that workers made without a lock; None: the step is one update."""
    stragglers: StragglerChange = field(default_factory=StragglerChange)
    """Ranks that began or ceased to be slow, by the times of the step before; on the main rank only."""
    float8: dict[str, tuple[float, float]] | None = None
    """For each block and the head, the worst values of its float8 tensors (float8_check.by_layer)."""
    again: int = 0
    """How often the step was repeated because a tensor had outgrown its scale."""
    expert_imbalance: float | None = None
    """Load of the busiest expert of any layer, relative to an even load."""
    expert_load: list[float] | None = None
    """Load of each expert over all layers, relative to an even load."""
    losses: dict[str, float] = field(default_factory=dict)
    """The mean of each loss of a program, by its name, and the number of items of the step as `items`."""
    logged: dict[str, float] = field(default_factory=dict)
    """Numbers that a program recorded on this rank."""

    @property
    def load_imbalance(self) -> float | None:
        """Time by which the slowest rank worked longer than the fastest on the step before, relative to the
        mean; None: not known."""
        work = [sum(seconds) for seconds in self.rank_seconds if seconds[0] > 0]
        return (max(work) - min(work)) / (sum(work) / len(work)) if work else None


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step that the host reads from the device."""

    shared: Shared
    norm: float
    tokens: int
    repeat: bool
    """Whether the step has to be repeated because a tensor outgrew its scale."""
    loads: Sequence[float]
    """With experts: the worst imbalance of a layer, and the load of every expert."""
    scaled: Sequence[float]
    """In float8: three numbers for every scaled tensor."""
    losses: Mapping[str, float]
    """In a program: the number of items, relative to the rows of the batch, and the mean of each loss."""


class QueuedNumbers:
    """The numbers of a step whose work is queued on the device."""

    def __init__(
        self, sums: StepSums, gradients: StepGradients, repeat: Tensor, loads: Tensor, scaled: Tensor
    ) -> None:
        vector, program = sums.vector, gradients.program
        self._names = () if program is None else ("items", *program.names)
        self._lengths = len(vector) - len(self._names), len(self._names), 3, len(loads), len(scaled)
        single = [number.to(vector).reshape(1) for number in (sums.norm, gradients.tokens, repeat)]
        self._numbers = torch.cat((vector, *single, loads.to(vector), scaled.to(vector)))

    def read(self) -> Numbers:
        """Wait for the device, and return the numbers."""
        numbers = iter(self._numbers.tolist())
        nccl.check_not_interrupted()
        shared, losses, single, loads, scaled = ([next(numbers) for _ in range(n)] for n in self._lengths)
        norm, tokens, repeat = single
        named = dict(zip(self._names, losses, strict=True))
        return Numbers(Shared.of(shared), norm, int(tokens), bool(repeat), loads, scaled, named)


class StepRecorder:
    """Makes the `StepRecord` of each step from the numbers that were read."""

    def __init__(self, training: Training) -> None:
        self._training, self._watch = training, _watch_over(training)
        self.last: StepRecord | None = None
        """The last step that was recorded; None: there is none yet."""
        self._again = 0

    def note_repeat(self) -> None:
        """Note that the present step is repeated, because a tensor outgrew its scale."""
        self._again += not self._training.comm.discard_gradients

    def record(self, numbers: Numbers, gradients: StepGradients, skipped: bool) -> StepRecord:
        """Return the record of the step that `training` has just reached."""
        training, shared, before = self._training, numbers.shared, self.last
        spans = training.comm.clock.finish()
        if not training.plan.waits_are_known(training.mesh.device.type):
            del spans[EXPOSED]
        done = StepRecord(
            step=training.step,
            loss=shared.loss,
            gradient_norm=numbers.norm,
            learning_rate=learning_rate(training.config.train, training.step) * gradients.rate,
            tokens=numbers.tokens * training.plan.groups,
            seconds=spans.pop("total"),
            spans=spans,
            collectives=training.comm.ledger.take(),
            communication=axis_times(training.comm.ledger.taken, training.comm.clock.waits()),
            memory_bytes=peak_memory(training.mesh.device.type),
            loss_scale=training.comm.loss_scale,
            skipped=skipped,
            stop=shared.stop,
            save=shared.save,
            data=f"{shared.checksum:014x}",
            ended=present_time(),
            rank_seconds=shared.rank_seconds if before else (),
            rows=gradients.rows,
            staleness=gradients.staleness,
            dropped=gradients.dropped,
            updates=gradients.updates,
            float8=self._float8(numbers.scaled),
            again=self._again,
            expert_imbalance=numbers.loads[0] if numbers.loads else None,
            expert_load=list(numbers.loads[1:]) if numbers.loads else None,
            losses=self._losses(numbers.losses),
        )
        self.last, self._again = self._watched(done), 0
        return self.last

    def seconds_of_this_rank(self) -> tuple[float, float]:
        """Return this rank's (compute, data) seconds of the step before, without its waits; zeros if there is
        none yet. Compute is zero if it cannot be separated from waits.

        On a GPU batches are fetched while the device computes, so data is only the time that exceeds this.
        """
        if self.last is None:
            return 0.0, 0.0
        spans = self.last.spans
        compute = spans["forward_backward"] + spans["optimizer"]
        data = min(spans["data"], max(0.0, self.last.seconds - compute - spans.get(EXPOSED, 0.0)))
        return (compute if EXPOSED in spans else 0.0), data

    def _losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        rows = self._training.config.train.global_batch
        return {name: value * rows if name == "items" else value for name, value in losses.items()}

    def _float8(self, scaled: Sequence[float]) -> dict[str, tuple[float, float]] | None:
        scales = self._training.parallel.scales
        return by_layer(scales, scaled) if scaled and scales is not None else None

    def _watched(self, done: StepRecord) -> StepRecord:
        """Return the record with the ranks that began or ceased to be slow, by the times of the step
        before."""
        if self._watch is None or self.last is None:
            return done
        changed = self._watch.step(self.last.step, done.rank_seconds, self.last.seconds)
        return replace(done, stragglers=changed)


def _watch_over(training: Training) -> StragglerWatch | None:
    """Return the watch for slow ranks, on the main rank. It compares ranks of one pipeline stage, which do
    the same work; stages are outermost on the grid."""
    world, stages = training.mesh.worker.world, training.plan.layout.pipeline
    if world == 1 or not training.mesh.is_main or not driver_of(training.config).lockstep:
        return None
    size = world // stages
    groups = [range(stage * size, (stage + 1) * size) for stage in range(stages)]
    return StragglerWatch(world, training.config.recovery.straggler, groups)
