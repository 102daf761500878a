"""Cost compressed gradients and rarer exchanges on slow links, as alternatives to the winner of a search.

Data-parallel devices agree on a gradient in every step: 4 bytes per parameter, sent about twice. On NVLink
that hides behind the backward pass; on Ethernet it may be most of the step. Two families of methods send
less:

- compression: a codec of shardwise/codecs, which `layout.compression` names. Fewer bits per value, fewer
  values, or two thin factors of each matrix. What a step leaves out is kept as a *residual* and added to the
  next gradient; that takes 4 bytes per parameter, and encoding takes time of its own (cost/codec_work.py).
- rarer exchanges (`train.driver = "local"`). Local SGD (Stich 2018) and DiLoCo (Douillard et al. 2023) let
  each group take H steps alone and then average the parameters: 4 bytes a parameter once in H steps. A group
  holds the whole model, so what ZeRO shared over all devices must fit into fewer.

Each is costed by the cost model, with its own traffic in place of that of gradients. What the backward pass
hides is still hidden. None of them computes the gradient of the plain job, so the search chooses one only if
the job allows it (search/lossy.py). Slower alternatives are listed too; on quick links most are slower.
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
from shardwise.cost.price import is_of_weights
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Space, Workload
from shardwise.cost.traffic import flows
from shardwise.plans.grid import devices
from shardwise.search.requirements import wire_bytes
from shardwise.search.search import NEAR, SearchResult

WORTHWHILE = 1.1
"""Factor by which a step must become quicker for a codec to be worth its risk."""
OUTER_EVERY = int(SECTIONS["local"].model_fields["sync_every"].default)
"""Number of steps between two exchanges of groups that train by themselves."""
_OUTER_BYTES = 8.0
"""Bytes for each averaged parameter: its value at the last average, and the outer momentum."""
_WAITS = ("data", "replica", "links")
"""Terms of a step that shrink with what the data axis sends."""
PLAIN = "none"
"""Name of the alternative that compresses nothing, where the job has a codec."""
_LATER = "what is left out is added to the next gradient"
CODECS = {
    "bfloat16": f"Gradients are sent with 8 bits of mantissa; {_LATER}.",
    "int8": f"Gradients are sent in 8 bits, with a scale for each 512; {_LATER}.",
    "qsgd(4)": f"Gradients are sent in 4 bits, rounded stochastically so that their mean is right; {_LATER}.",
    "sign": f"Only signs are sent, with a mean magnitude for each 512; {_LATER}. Compare the loss with a "
    f"plain run first.",
    "topk(0.01)": f"Only the largest 1 % are sent; {_LATER}. Give it a warm-up (layout.compression_warmup).",
    "powersgd(4)": f"Each matrix is sent as a product of rank 4; {_LATER}. Too low a rank costs quality.",
}
"""Codecs that are proposed, and what each changes. Those that change least come first."""


@dataclass(frozen=True)
class Alternative:
    """One way to send less than the winner does, or if the winner compresses, to send everything."""

    name: str
    """Name of the method; for a codec, the value of `layout.compression`."""
    bytes_per_step: float
    """Bytes per step that one device sends to agree on gradients or averages."""
    exposed_seconds: float
    """Seconds of a step that the data axis costs: communication and compression that nothing hides."""
    step_seconds: float
    extra_memory: float
    """Additional bytes on one device, for residuals or for the average to compare with."""
    fits: bool
    """Whether the winner's layout has memory for that."""
    changes: str
    """How the training differs from the plain job, in a sentence."""


def exposed_share(result: SearchResult) -> float:
    """Return the fraction of the winner's step that waits for the data axis; 0 if nothing fits."""
    if not len(result.order):
        return 0.0
    prediction = result.prediction(int(result.order[0]))
    return float(_waiting(prediction) / prediction.total[0])


def alternatives(result: SearchResult) -> list[Alternative]:
    """Return each way to send less with the winner's layout, the quickest first; none if there is no data
    axis."""
    if not len(result.order):
        return []
    winner = result.space.take([int(result.order[0])])
    if int(winner.shards[0] * winner.replica[0]) == 1:
        return []
    choices = [*_compressed(result, winner), *_local(result, winner)]
    return sorted(choices, key=lambda choice: choice.step_seconds)


def proposed(choices: Sequence[Alternative], step_seconds: float) -> str | None:
    """Return the codec among these alternatives that is worth its risk, if any. `step_seconds` is the time of
    the step without it."""
    codecs = [choice for choice in choices if choice.name in CODECS and choice.fits]
    return worthwhile({choice.name: choice.step_seconds for choice in codecs}, step_seconds)


def worthwhile(seconds: Mapping[str, float], step_seconds: float) -> str | None:
    """Return the quickest of these codecs, if its step is sufficiently quicker than the step without.

    `seconds` has the time of a step with each codec. Among codecs that the model cannot tell apart, the one
    that changes the numbers least is returned.
    """
    quickest = min(seconds.values(), default=0.0)
    most = min((1 + NEAR) * quickest, step_seconds / WORTHWHILE)
    return next((name for name in CODECS if name in seconds and seconds[name] <= most), None)


def gradient_bytes(result: SearchResult) -> float:
    """Return the bytes that one device sends per step to agree on gradients, with the winner's layout."""
    return _sent(result, result.work, result.space.take([int(result.order[0])]))


# -- compression ---------------------------------------------------------------------------------------------


def _compressed(result: SearchResult, winner: Space) -> Iterator[Alternative]:
    """Yield every codec that the winner's layout can use, with the job's own settings; and the alternative
    without a codec, if the job has one."""
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
    """Return the seconds of the winner's step, with the difference that closed forms give for another
    prediction."""
    plain = predict(result.work, winner, result.cluster, SHARDWISE)
    return float(result.total[result.order[0]] + prediction.total[0] - plain.total[0])


def _waiting(prediction: Prediction) -> float:
    """Return the exposed seconds of the data axis in a step."""
    return float(sum(prediction.seconds[name][0] for name in _WAITS))


def _sent(result: SearchResult, work: Workload, space: Space) -> float:
    """Return the bytes that one device sends per step to agree on gradients: the sums among its traffic,
    plain and compressed."""
    sums = [
        flow.bytes * wire_factor(flow.kind, devices(flow.axis, space).astype(float))
        for flow in flows(work, space, SHARDWISE, result.cluster.device_type)
        if flow.codec_work is not None
        or (flow.kind in ("reduce_scatter", "all_reduce") and is_of_weights(flow))
    ]
    return float(sum(sums, np.zeros(1))[0])


# -- local training ------------------------------------------------------------------------------------------


def _local(result: SearchResult, winner: Space) -> Iterator[Alternative]:
    """Yield local training in the smallest groups that hold the model, if these are smaller than all
    devices."""
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
    extra = float(prediction.peak[0] - result.peak[result.order[0]])
    yield Alternative(
        f"local, {count} groups",
        bytes_per_step=_sent(result, result.work, worker) + averaged,
        exposed_seconds=_waiting(prediction) + outer,
        step_seconds=_step(result, winner, prediction) + outer,
        extra_memory=max(0.0, extra + _OUTER_BYTES * share),
        fits=True,
        changes=f"{count} groups train by themselves and exchange weights every {OUTER_EVERY} steps "
        f"(DiLoCo): another algorithm; many groups or long rounds end at a higher loss. "
        f'train.driver = "local", local.groups = {count}, and of the layout '
        f"data = {int(worker.data[0])}, replica = 1, zero = {int(worker.zero[0])}.",
    )


def _smallest_worker(result: SearchResult, winner: Space) -> Space | None:
    """Return the winner's layout on the fewest data-parallel devices that hold it: at least those of a node,
    and fewer than all."""
    copies, inner = int(winner.data[0] * winner.replica[0]), int(winner.tensor[0] * winner.context[0])
    node = result.cluster.devices_per_node
    for size in divisors(copies)[:-1]:
        if size * inner < node < copies * inner:
            continue  # links inside a node are quick: there is no need to avoid them
        worker = replace(winner, data=np.asarray([size]), replica=np.asarray([1]))
        if int(worker.shards[0]) == 1:
            worker = replace(worker, zero=np.asarray([0]))
        prediction = predict(result.work, worker, result.cluster, SHARDWISE)
        if result.holds(prediction.peak + _OUTER_BYTES * _share(result, worker), prediction.host)[0]:
            return worker
    return None


def _share(result: SearchResult, worker: Space) -> float:
    """Return the number of parameters that one device of a group averages with the same device of the other
    groups."""
    parameters = float(hold(result.work, worker, SHARDWISE).parameters[0])
    return parameters / (int(worker.shards[0]) if worker.zero[0] else 1)
