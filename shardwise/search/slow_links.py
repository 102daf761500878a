"""What compressed gradients and rarer exchanges would give where links are slow, as choices beside a search's
winner.

Data-parallel devices agree on a gradient in every step: 4 bytes a parameter, about twice over the wire. On
NVLink that hides behind the backward pass; on Ethernet it may be most of the step. Two families send less:

- compression: a codec of shardwise/codecs, which `layout.compression` names. Fewer bits a value, fewer
  values, or two thin factors of each matrix. What a step leaves out is kept as a *residual* and added to the
  next gradient; that takes 4 bytes a parameter, and encoding takes time of its own (cost/codec_work.py).
- rarer exchanges (`train.driver = "local"`). Local SGD (Stich 2018) and DiLoCo (Douillard et al. 2023) let
  each group take H steps alone and then average the parameters: 4 bytes a parameter once in H steps. A group
  holds the whole model, so what ZeRO shared over all devices must fit into fewer.

Each is costed by the model of the step with its own flows in place of the gradients': what the backward pass
hides still hides. None of them computes the gradient of the plain job, so none is chosen by the search unless
the job accepts it (search/lossy.py). Those that would be slower are listed too: on quick links most are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.config import Layout, divisors, problems_of_compression
from shardwise.config.compression import SETTINGS, SumCompression
from shardwise.config.schema import SECTIONS
from shardwise.cost.collectives import group_of, rates, wire_factor
from shardwise.cost.footprint import hold
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.price import axis_of
from shardwise.cost.space import Space, Work
from shardwise.cost.stack import SHARDWISE
from shardwise.cost.traffic import flows
from shardwise.plan.grid import devices
from shardwise.search.requirements import wire_bytes
from shardwise.search.search import NEAR, SearchResult

WORTHWHILE = 1.1
"""How many times quicker a step must become for a codec to be worth its risk."""
OUTER_EVERY = int(SECTIONS["local"].model_fields["sync_every"].default)
"""Steps between two exchanges of groups that train by themselves."""
_OUTER_BYTES = 8.0
"""For each parameter averaged: its value at the last average, and the outer momentum."""
_DATA = ("data", "replica")
_WAITS = (*_DATA, "links")
"""Terms of a step that shrink with what the data axis sends."""
PLAIN = "none"
"""The name of the alternative to a job's codec that compresses nothing."""
_LATER = "what is left out is added to the next gradient"
CODECS = {
    "bfloat16": f"Gradients are sent with 8 bits of mantissa; {_LATER}.",
    "int8": f"Gradients are sent in 8 bits, with a scale for each 512; {_LATER}.",
    "qsgd(4)": f"Gradients are sent in 4 bits, rounded by chance so that their mean is right; {_LATER}.",
    "sign": f"Only signs are sent, with a mean magnitude for each 512; {_LATER}. Compare the loss with a "
    f"plain run first.",
    "topk(0.01)": f"Only the largest 1 % are sent; {_LATER}. Give it a warm-up (layout.compression_warmup).",
    "powersgd(4)": f"Each matrix is sent as a product of rank 4; {_LATER}. Too low a rank costs quality.",
}
"""Those that are proposed, and what each changes; those that change least come first."""


@dataclass(frozen=True)
class Alternative:
    """One way to send less than the winner does, or, where that compresses, to send everything."""

    name: str
    """Of a codec, as `layout.compression` has it."""
    bytes_per_step: float
    """That one device sends to agree on gradients (or averages), a step."""
    exposed_seconds: float
    """Of a step, for the data axis: communication, and the work of compressing, that nothing hides."""
    step_seconds: float
    extra_memory: float
    """Bytes on one device, for residuals or for the average to compare with."""
    fits: bool
    """Whether the winner's layout has room for that."""
    changes: str
    """What is different from the plain job, in a sentence."""


def exposed_share(result: SearchResult) -> float:
    """Of the winner's step, what it waits for the data axis; 0 where nothing fits."""
    if not len(result.order):
        return 0.0
    prediction = result.prediction(int(result.order[0]))
    return float(_waiting(prediction) / prediction.total[0])


def alternatives(result: SearchResult) -> list[Alternative]:
    """Each way to send less with the winner's layout, the quickest first; none where there is no data
    axis."""
    if not len(result.order):
        return []
    winner = result.space.take([int(result.order[0])])
    if int(winner.shards[0] * winner.replica[0]) == 1:
        return []
    choices = [*_compressed(result, winner), *_local(result, winner)]
    return sorted(choices, key=lambda choice: choice.step_seconds)


def proposed(choices: Sequence[Alternative], step_seconds: float) -> str | None:
    """Of these alternatives to a step of so many seconds, the codec that is worth its risk, if any."""
    return worthwhile(
        {choice.name: choice.step_seconds for choice in choices if choice.name in CODECS and choice.fits},
        step_seconds,
    )


def worthwhile(seconds: Mapping[str, float], step_seconds: float) -> str | None:
    """Of codecs with which a step takes so many seconds, the quickest, if it is enough quicker than the step
    without; of those that are as quick as the model can tell, the one that changes the numbers least."""
    quickest = min(seconds.values(), default=0.0)
    most = min((1 + NEAR) * quickest, step_seconds / WORTHWHILE)
    return next((name for name in CODECS if name in seconds and seconds[name] <= most), None)


def gradient_bytes(result: SearchResult) -> float:
    """Bytes that one device sends a step to agree on gradients, as the winner does it."""
    return _sent(result, result.work, result.space.take([int(result.order[0])]))


# -- compression ---------------------------------------------------------------------------------------------


def _compressed(result: SearchResult, winner: Space) -> Iterator[Alternative]:
    """Every codec that the winner's layout can run, with the job's own settings beside it; and none, where it
    has one."""
    if result.work.compression is not None:
        yield _alternative(result, winner, PLAIN, None, "Gradients are summed as they are.")
    settings = {name: result.fixed[name] for name in SETTINGS if name in result.fixed}
    layout = winner.layout(0).model_copy(update=settings)
    for name, changes in CODECS.items():
        coded: Layout = layout.model_copy(update={"compression": name})
        how = SumCompression.of(coded)
        if how != result.work.compression and not any(problems_of_compression(coded)):
            yield _alternative(result, winner, name, how, changes)


def _alternative(
    result: SearchResult, winner: Space, name: str, how: SumCompression | None, changes: str
) -> Alternative:
    work = replace(result.work, compression=how)
    prediction = predict(work, winner, result.cluster, SHARDWISE)
    extra = float(prediction.peak[0] - result.peak[result.order[0]])
    return Alternative(
        name,
        bytes_per_step=_sent(result, work, winner),
        exposed_seconds=_waiting(prediction),
        step_seconds=_step(result, winner, prediction),
        extra_memory=max(0.0, extra),
        fits=bool(result.holds(prediction.peak, prediction.host)[0]),
        changes=changes,
    )


def _step(result: SearchResult, winner: Space, prediction: Prediction) -> float:
    """The winner's step, with what the closed forms say that another prediction changes."""
    plain = predict(result.work, winner, result.cluster, SHARDWISE)
    return float(result.total[result.order[0]] + prediction.total[0] - plain.total[0])


def _waiting(prediction: Prediction) -> float:
    """Exposed seconds of the data axis in a step."""
    return float(sum(prediction.seconds[name][0] for name in _WAITS))


def _sent(result: SearchResult, work: Work, space: Space) -> float:
    """Bytes that one device sends a step to agree on gradients: the sums among its flows, plain and
    compressed."""
    sums = [
        flow.bytes * wire_factor(flow.kind, devices(flow.axis, space).astype(float))
        for flow in flows(work, space, SHARDWISE, result.cluster.device_type)
        if flow.codec_work is not None
        or (flow.kind in ("reduce_scatter", "all_reduce") and axis_of(flow) in _DATA and flow.when != "step")
    ]
    return float(sum(sums, np.zeros(1))[0])


# -- local training ------------------------------------------------------------------------------------------


def _local(result: SearchResult, winner: Space) -> Iterator[Alternative]:
    """The smallest groups that hold the model, if any that are less than all devices do."""
    worker = _smallest_worker(result, winner)
    if worker is None:
        return
    count = int(winner.data[0] * winner.replica[0] // worker.data[0])
    prediction = predict(result.work, worker, result.cluster, SHARDWISE)
    share = _share(result, worker)
    group = group_of("replica", replace(worker, replica=np.asarray([count])), result.cluster)
    alpha, beta = rates("all_reduce", group, result.cluster)
    outer = float(alpha[0] + 4.0 * share * beta[0]) / OUTER_EVERY
    averaged = wire_bytes("all_reduce", 4.0 * share, count) / OUTER_EVERY
    yield Alternative(
        f"local, {count} groups",
        bytes_per_step=_sent(result, result.work, worker) + averaged,
        exposed_seconds=_waiting(prediction) + outer,
        step_seconds=_step(result, winner, prediction) + outer,
        extra_memory=max(
            0.0, float(prediction.peak[0] - result.peak[result.order[0]]) + _OUTER_BYTES * share
        ),
        fits=True,
        changes=f"{count} groups train by themselves and exchange weights every {OUTER_EVERY} steps "
        "(DiLoCo): another algorithm; many groups "
        f'or long rounds end at a higher loss. train.driver = "local", local.groups = {count}, and of the '
        f"layout data = "
        f"{int(worker.data[0])}, replica = 1, zero = {int(worker.zero[0])}.",
    )


def _smallest_worker(result: SearchResult, winner: Space) -> Space | None:
    """The winner's layout on as few data-parallel devices as hold it: at least those that share a node, less
    than all."""
    copies, inner = int(winner.data[0] * winner.replica[0]), int(winner.tensor[0] * winner.context[0])
    node = result.cluster.devices_per_node
    for size in divisors(copies)[:-1]:
        if size * inner < node < copies * inner:
            continue  # inside a node links are quick: no need to do without
        worker = replace(winner, data=np.asarray([size]), replica=np.asarray([1]))
        if int(worker.shards[0]) == 1:
            worker = replace(worker, zero=np.asarray([0]))
        prediction = predict(result.work, worker, result.cluster, SHARDWISE)
        if result.holds(prediction.peak + _OUTER_BYTES * _share(result, worker), prediction.host)[0]:
            return worker
    return None


def _share(result: SearchResult, worker: Space) -> float:
    """Parameters that one device of a worker averages with its like in the other workers."""
    parameters = float(hold(result.work, worker, SHARDWISE).parameters[0])
    return parameters / (int(worker.shards[0]) if worker.zero[0] else 1)
