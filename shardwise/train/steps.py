"""The training step, as a generator of what happened.

One step: forward and backward over the micro-batches, the exact global norm, the fused update, and one read
of the numbers. The host waits for the device once, after everything is queued, so a GPU never runs dry
between steps. A non-finite loss or gradient is noticed on the device, in time for the update to leave the
weights alone; the host learns of it at that one read.

What ranks have to tell each other travels in one vector of float64, summed once a step: the loss, votes to
stop or to save, the checksum of the sequences read (data/batches.py), and how long each rank worked on the
step before, in a slot of its own (32 bytes, and 16 a rank). The checksum, of up to 56 bits, is sent as two
halves of 28, whose sums stay exact for more ranks than there can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.comm import EXPOSED
from shardwise.errors import RunFailed
from shardwise.observe import AxisTimes, axis_times, peak_memory, present_time
from shardwise.optim import first_non_finite, global_norm, learning_rate, update
from shardwise.parallel import build_plain
from shardwise.plan import RANK_AXES
from shardwise.resilience.stragglers import StragglerChange, StragglerWatch
from shardwise.train.build import Training
from shardwise.train.guard import check_copies, check_gradients
from shardwise.train.sources import Drawn, OwnRows, Source, Updates

_HALF = 1 << 28
"""A checksum has up to 2 x 28 bits: 32 of each sequence, and 24 of their number."""
_STOP, _SAVE = 1.0, 0.5
"""What a vote counts. Any rank may vote to stop; the main one alone looks at the clock and votes to save, so
votes that add up to less than one are its. Whoever stops saves."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step did; numbers are the same on every rank, spans and collectives are this
    rank's."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    spans: dict[str, float]
    collectives: dict[str, dict[str, int]]
    communication: AxisTimes
    """By axis, for how long something was under way, and how much of that was hidden; nothing on a GPU."""
    memory_bytes: int
    loss_scale: float
    skipped: bool
    stop: bool
    save: bool
    """Whether the main rank's clock says that a save is due."""
    data: str
    """A checksum of the sequences of the global batch, 14 hexadecimal digits: the same on every layout."""
    ended: float
    """When it was done, in seconds since 1970."""
    rank_seconds: tuple[tuple[float, float], ...] = ()
    """(compute, data) seconds of each rank in the step before, without waits; none after the first step, nor
    on one device."""
    rows: tuple[int, ...] = ()
    """Of the global batch, by data-parallel device; where they are dealt out by speed."""
    staleness: tuple[int, ...] = ()
    """Of the gradients that it is the sum of; where they were computed by others."""
    dropped: int = 0
    """Gradients that came after another of the same portion."""
    updates: Updates | None = None
    """That workers made without a lock; None: the step is one update."""
    stragglers: StragglerChange = field(default_factory=StragglerChange)
    """Who began or ceased to be slow, by the step before; on the main rank only."""
    float8: dict[str, tuple[float, float]] | None = None
    """Of each block and the head, the worst of its tensors in float8: the share of numbers lost below the
    range, and the largest number relative to the range's end."""
    again: int = 0
    """How often it was made again, because a tensor had outgrown its scale."""
    expert_imbalance: float | None = None
    """Load of the busiest expert of any layer, relative to an even load."""
    expert_load: list[float] | None = None
    """Load of each expert over all layers, relative to an even load."""

    @property
    def load_imbalance(self) -> float | None:
        """How much longer the slowest rank worked on the step before than the quickest, relative to the mean;
        None: not known."""
        work = [sum(seconds) for seconds in self.rank_seconds if seconds[0] > 0]
        return (max(work) - min(work)) / (sum(work) / len(work)) if work else None


@dataclass(frozen=True)
class _Queued:
    """A step whose work is queued on the device: (what is shared, gradient norm, tokens, whether it has to be
    made again, then of models with experts the worst imbalance and every expert's load, then in float8 what
    was seen of every scaled tensor), not yet read."""

    numbers: Tensor
    shared: int
    loads: int
    learning_rate: float
    drawn: Drawn
    only_to_look: bool
    """Whether float8 knew no scales from steps before."""


def never() -> bool:
    """Nobody asks."""
    return False


def steps(
    training: Training,
    stop_asked: Callable[[], bool] = never,
    save_due: Callable[[], bool] = never,
    source: Source | None = None,
) -> Iterator[Step]:
    """Train from the step reached to the last one, with gradients of this rank's own rows unless another
    source is given. Ends early, on all ranks together, once any rank is asked to stop. All hear by the same
    step, too, that a save is due where the main rank says so.
    """
    source = source or OwnRows(training)
    watch = watch_over(training)
    scales = training.parallel.scales
    try:
        training.comm.clock.restart()
        if scales is not None:
            scales.begin()
        before: Step | None = None
        again = 0
        while training.step < training.config.train.steps:
            vote = 0.0
            if training.outer is None or training.outer.meets(
                training.step + 1
            ):  # else not all are here to hear it
                vote = _STOP if stop_asked() else _SAVE if training.mesh.is_main and save_due() else 0.0
            queued = _queue(training, source, vote, before)
            if queued is None:
                return
            source.ahead()  # while the device is busy
            read = _read(training, queued, before)
            if read is None:
                again += not queued.only_to_look
                source.again()
                continue
            done, again = replace(_watched(watch, before, read), again=again), 0
            source.hear(done.step, done.rank_seconds)
            yield done
            if done.stop:
                return
            before = done
    finally:
        source.close()


def watch_over(training: Training) -> StragglerWatch | None:
    """Looks for slow ranks, on the main rank. Those of one pipeline stage do the same work; stages are
    outermost on the grid."""
    world, stages = training.mesh.worker.world, training.plan.layout.pipeline
    if world == 1 or not training.mesh.is_main or training.config.train.driver != "synchronous":
        return None
    size = world // stages
    groups = [range(stage * size, (stage + 1) * size) for stage in range(stages)]
    return StragglerWatch(world, training.config.recovery.straggler, groups)


def _watched(watch: StragglerWatch | None, before: Step | None, done: Step) -> Step:
    if watch is None or before is None:
        return done
    return replace(done, stragglers=watch.step(before.step, done.rank_seconds, before.seconds))


def _queue(training: Training, source: Source, vote: float, before: Step | None) -> _Queued | None:
    """Hand all of a step's work to the device; None: the source has no more."""
    comm, clock = training.comm, training.comm.clock
    comm.step, comm.loss_scale = training.step + 1, training.scale.value
    scales = training.parallel.scales
    comm.only_to_look = scales is not None and not scales.known
    drawn = source.draw()
    if drawn is None:
        return None
    seen = None
    if scales is not None:
        seen = scales.see()
        scales.remember(seen)
    message = _message_to_all(training, drawn.checksum, vote, before)
    with clock.span("forward_backward"):
        norm = gradient_norm(training) if drawn.norm is None else drawn.norm
        shared = share(training, torch.cat((drawn.loss.double().reshape(1), message)))
    train = training.config.train
    checked = train.check_every > 0 and (training.step + 1) % train.check_every == 0
    if checked or before is None:
        check_gradients(training)
    lr = learning_rate(train, training.step + 1) * drawn.rate
    with clock.span("optimizer"):
        finite = torch.isfinite(norm) & torch.isfinite(shared[0])
        again = torch.zeros_like(finite)
        if seen is not None:
            again = torch.isfinite(shared[0]) & seen.finite & seen.outgrown
            finite &= ~seen.outgrown & seen.finite
        if drawn.updates is None:
            update(training.optimizer, lr, divisor(training, norm), (~finite).float())
        loads = _balance(training, finite)
        _meet(training, shared, again)
    if scales is not None:
        scales.begin()  # of the next step, while the device has work
    if checked:
        check_copies(training)
    own = (
        shared,
        *(number.to(shared).reshape(1) for number in (norm, drawn.tokens, again)),
        loads.to(shared),
    )
    scaled = torch.empty(0, device=comm.device) if seen is None else seen.numbers.flatten()
    return _Queued(
        torch.cat((*own, scaled.to(shared))), len(shared), len(loads), lr, drawn, comm.only_to_look
    )


def _meet(training: Training, shared: Tensor, again: Tensor) -> None:
    """Where groups train by themselves and this is a step to meet after: share the votes, and make the outer
    step. Scales are a group's own. One whose step has to be made again comes to the meeting once it is made:
    others wait for that, and so the host asks the device."""
    outer, step = training.outer, training.step + 1
    if outer is None or not outer.waits(step) or (training.parallel.scales is not None and bool(again)):
        return
    if outer.meets(step):
        training.comm.all_reduce(shared[1:2], "group")  # the rest is of this group
    outer.after(step)


def _message_to_all(training: Training, checksum: int, vote: float, before: Step | None) -> Tensor:
    """What this rank shares with all others beside its loss: its vote, the checksum of its sequences, and its
    times of the step before.
    """
    mesh, rank, world = training.mesh, training.mesh.worker.rank, training.mesh.worker.world
    high, low = divmod(checksum, _HALF)
    times = [(0.0, 0.0)] * (world if world > 1 else 0)
    if times and before is not None:
        times[rank] = _own_seconds(training, before)
    values = [vote, high, low, *(seconds for pair in times for seconds in pair)]
    message = torch.tensor(values, dtype=torch.float64, pin_memory=mesh.device.type == "cuda")
    return message.to(
        mesh.device, non_blocking=True
    )  # from pinned memory, or the host would wait for the device


def _own_seconds(training: Training, done: Step) -> tuple[float, float]:
    """This rank's (compute, data) seconds of a step, without its waits; compute is zero where waits cannot be
    told from it.

    On a GPU batches are fetched while the device computes. Only what the device had to wait for counts.
    """
    layout, spans = training.plan.layout, done.spans
    compute = spans["forward_backward"] + spans["optimizer"]
    data = min(spans["data"], max(0.0, done.seconds - compute - spans.get(EXPOSED, 0.0)))
    unseen = (
        training.mesh.device.type != "cpu"
        and layout.pipeline * layout.context * layout.tensor * layout.expert > 1
    )
    return (0.0 if unseen or EXPOSED not in spans else compute), data


def _balance(training: Training, finite: Tensor) -> Tensor:
    """Let routers answer to the step's loads, unless the step is skipped; (imbalance, load of each expert),
    or nothing."""
    parallel, comm = training.parallel, training.comm
    if not training.config.model.experts:
        return torch.empty(0, device=comm.device)
    loads = parallel.take_loads()
    parallel.balance(loads * finite)
    worst = (loads.double() / loads.double().mean(1, keepdim=True)).flatten()
    worst = torch.cat((worst, worst.new_zeros(1))).max()  # of a stage without experts: zero
    comm.all_reduce(worst, "pipeline", op=torch.distributed.ReduceOp.MAX)
    sums = comm.all_reduce(loads.sum(0) + loads.new_zeros(training.config.model.experts), "pipeline").double()
    return torch.cat((worst.unsqueeze(0), sums / sums.mean()))


def _read(training: Training, queued: _Queued, before: Step | None) -> Step | None:
    """Wait for the device, once, and take stock; None: the step has to be made again, because a tensor
    outgrew its scale."""
    numbers = queued.numbers.tolist()
    loss, votes, high, low, *times = numbers[: queued.shared]
    norm, tokens, again, *rest = numbers[queued.shared :]
    loads, scaled = rest[: queued.loads], rest[queued.loads :]
    number, scale = training.step + 1, training.scale.value
    if again:
        training.optimizer.zero_grad(set_to_none=not training.parallel.keeps_gradients)
        return None
    unseen = [
        index for index, largest in enumerate(scaled[::3]) if not math.isfinite(largest)
    ]  # which a cast would hide
    overflowed = not (math.isfinite(norm) and math.isfinite(loss)) or bool(unseen)
    hopeless = (
        not math.isfinite(loss) or scale <= 1
    )  # the loss itself is not scaled, and below 1 there is nothing to gain
    if overflowed and (hopeless or not training.scale.dynamic):
        _stop_non_finite(training, number, loss, unseen)
    training.optimizer.zero_grad(set_to_none=not training.parallel.keeps_gradients)
    training.scale = training.scale.after(overflowed)
    training.step, training.sequences = number, training.sequences + training.config.train.global_batch
    spans = training.comm.clock.finish()
    if not training.parallel.waits_are_timed:
        del spans[EXPOSED]
    return Step(
        step=number,
        loss=loss,
        gradient_norm=norm,
        learning_rate=queued.learning_rate,
        tokens=int(tokens) * training.plan.groups,
        seconds=spans.pop("total"),
        spans=spans,
        collectives=training.comm.ledger.take(),
        communication=axis_times(training.comm.ledger.taken, training.comm.clock.waits()),
        memory_bytes=peak_memory(training.mesh.device.type),
        loss_scale=scale,
        skipped=overflowed,
        stop=votes >= _STOP,
        save=votes == _SAVE,
        data=f"{int(high) * _HALF + int(low):014x}",
        ended=present_time(),
        rank_seconds=tuple(zip(times[::2], times[1::2], strict=True)) if before else (),
        rows=queued.drawn.rows,
        staleness=queued.drawn.staleness,
        dropped=queued.drawn.dropped,
        updates=queued.drawn.updates,
        float8=_by_layer(training, scaled) if scaled else None,
        expert_imbalance=loads[0] if loads else None,
        expert_load=loads[1:] if loads else None,
    )


def _by_layer(training: Training, scaled: list[float]) -> dict[str, tuple[float, float]]:
    assert training.parallel.scales is not None, "numbers of them are there"
    layers: dict[str, tuple[float, float]] = {}
    for name, lost, relative in zip(training.parallel.scales.names, scaled[1::3], scaled[2::3], strict=True):
        layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        most = layers.get(layer, (0.0, 0.0))
        layers[layer] = max(most[0], lost), max(most[1], relative)
    return layers


def share(training: Training, numbers: Tensor) -> Tensor:
    """Sum numbers over all devices that had other tokens or other stages; those of a tensor group had the
    same."""
    comm = training.comm
    for axis in ("context", "pipeline"):
        comm.all_reduce(numbers, axis)
    comm.sum_over_data(numbers)
    comm.all_reduce(numbers, "tensor", op=torch.distributed.ReduceOp.MAX)
    return numbers


def gradient_norm(training: Training) -> Tensor:
    """Of the gradients in place, without the loss scale."""
    parameters = (parameter for _, parameter in training.parallel.named_parameters(once=True))
    return global_norm(parameters, training.comm) / training.scale.value


def divisor(training: Training, norm: Tensor) -> Tensor:
    """What gradients are divided by in the update: the loss scale, and more where the norm exceeds the
    limit."""
    clip = training.config.train.clip
    excess = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
    return excess * training.scale.value


def _stop_non_finite(training: Training, step: int, loss: float, unseen: list[int]) -> None:
    """Say where the first non-finite number is, over all ranks, and end the run with the weights as they
    were."""
    names = [name for name, _ in build_plain(training.config).named_parameters()]
    mine = first_non_finite(training.parallel.named_parameters())
    index = torch.tensor(names.index(mine) if mine else len(names), device=training.mesh.device)
    for axis in RANK_AXES:
        training.comm.all_reduce(index, axis, op=torch.distributed.ReduceOp.MIN)
    name = names[int(index)] if int(index) < len(names) else None
    gradient = (
        f"the gradient of {name} is the first that is not finite" if name else "all gradients are finite"
    )
    if unseen and training.parallel.scales is not None:
        module, _, kind = training.parallel.scales.names[unseen[0]].partition(".float8.")
        gradient += f", but not the {kind} of the float8 product of {module}"
    raise RunFailed(
        f"step {step}: the loss is {loss} and {gradient}. The weights were not touched, and checkpoints "
        "are kept. Lower train.learning_rate, add warm-up, or look at the data of this step, and run the "
        "command again."
    )
