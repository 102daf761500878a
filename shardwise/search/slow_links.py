"""What compressed gradients and rarer exchanges would give where links are slow, as choices beside a search's winner.

Data-parallel devices agree on a gradient in every step: 4 bytes a parameter, about twice over the wire. On NVLink that hides
behind the backward pass; on Ethernet it may be most of the step. Two families send less:

- compression. Fewer bits a value (bfloat16; int8 with a scale for each group, as ZeRO++'s qgZ, Wang et al. 2023; signs only, as
  1-bit Adam, Tang et al. 2021), fewer values (the largest 1 %, Lin et al. 2018), or two thin factors of each matrix (PowerSGD,
  Vogels et al. 2019). What a step leaves out is kept as an *error* and added to the next gradient, so nothing is lost for good;
  that takes 4 bytes a parameter and a few passes over memory.
- rarer exchanges. Local SGD (Stich 2018) and DiLoCo (Douillard et al. 2023) let each worker take H steps alone and then average
  the parameters: 4 bytes a parameter once in H steps. A worker is a group of devices that holds the whole model, so what ZeRO
  shared over all devices must fit into fewer.

Each is costed by the model of the step with its own bytes in place of the gradients': what the backward pass hides still hides.
None of them computes the gradient of the plain job, so none is chosen by the search, and `shardwise train` runs none of them yet.
An alternative that would send more than the winner does is left out: the largest 1 % with their places are 8 bytes for each value
kept, from every device to every device, which is more than the dense sum from about 100 devices on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal

import numpy as np

from shardwise.config import Model, divisors
from shardwise.cost import compute
from shardwise.cost.collectives import group_of, rates, wire_factor
from shardwise.cost.footprint import hold
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.price import axis_of
from shardwise.cost.space import Space
from shardwise.cost.stack import SHARDWISE
from shardwise.cost.traffic import flows
from shardwise.plan.engine import engine_of
from shardwise.plan.grid import devices
from shardwise.plan.parameters import parameter_shapes
from shardwise.search.requirements import wire_bytes
from shardwise.search.search import SearchResult

WORTHWHILE = 0.1
"""Share of the step, exposed on the data axis, from which any of this is worth its risk."""
OUTER_EVERY = 100
"""Steps between two averages of local training."""
KEPT = 0.01
"""Share of a gradient's values that top-k sends."""
RANK = 4
"""Columns of PowerSGD's factors."""
_OUTER_BYTES = 8.0
"""For each parameter averaged: its value at the last average, and the outer momentum."""
_DATA = ("data", "replica")
_PLANNED = "Planned: shardwise train does not run it yet."


@dataclass(frozen=True)
class Alternative:
    """One way to send less than the winner does."""

    name: str
    bytes_per_step: float
    """That one device sends to agree on gradients (or averages), a step."""
    exposed_seconds: float
    """Of a step, for the data axis: communication that nothing hides, and the work of compressing."""
    step_seconds: float
    extra_memory: float
    """Bytes on one device, for errors or for the average to compare with."""
    fits: bool
    """Whether the winner's layout has room for that."""
    changes: str
    """What is different from the plain job, in a sentence."""
    runs: bool = False
    """Whether `shardwise train` can do it today."""


def exposed_share(result: SearchResult) -> float:
    """Of the winner's step, what it waits for the data axis; 0 where nothing fits."""
    if not len(result.order):
        return 0.0
    prediction = result.prediction(int(result.order[0]))
    return float(sum(prediction.seconds[name][0] for name in _DATA) / prediction.total[0])


def worthwhile(result: SearchResult) -> bool:
    """Whether the winner waits long enough for the data axis that sending less could matter."""
    return exposed_share(result) > WORTHWHILE


def alternatives(result: SearchResult) -> list[Alternative]:
    """Each way to send less with the winner's layout, the quickest first; none where there is no data axis."""
    if not len(result.order):
        return []
    winner = result.space.take([int(result.order[0])])
    if int(winner.shards[0] * winner.replica[0]) == 1:
        return []
    planned = gradient_bytes(result)
    choices = [*(_compressed(result, winner, how) for how in _compressions(result, winner)), *_local(result, winner)]
    return sorted((choice for choice in choices if choice.bytes_per_step <= planned), key=lambda choice: choice.step_seconds)


def gradient_bytes(result: SearchResult) -> float:
    """Bytes that one device sends a step to agree on gradients, as the winner does it."""
    return _sent(result, result.space.take([int(result.order[0])]), SHARDWISE.reduce_bytes)


# -- compression --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compression:
    """A way to write a gradient."""

    name: str
    bytes_per_value: float
    """Of one device's message."""
    collective: Literal["same", "all_reduce", "all_gather"]
    """What carries it: what the layout uses anyway, or one that gives the whole result to every device."""
    traffic: float
    """Bytes of memory read and written for each value, to compress and to restore."""
    error: float
    """Bytes kept for each value until the next step."""
    changes: str


def _compressions(result: SearchResult, winner: Space) -> Iterator[_Compression]:
    yield _Compression(
        "bfloat16 gradients", 2.0, "same", 0.0, 0.0,
        "Gradients are summed over devices with 8 bits of mantissa: not exact, and rounded more the more devices there are.",
    )  # fmt: skip
    yield _Compression(
        "int8 gradients (qgZ)", 1 + 4 / 256, "same", 10.0, 0.0,
        "Gradients are rounded to 8 bits with a scale for each 256 values: not exact; compare the loss with a plain run first.",
    )  # fmt: skip
    yield _Compression(
        "1-bit Adam", 4 / 32, "same", 16.0, 4.0,
        "Only the momentum's signs are sent, with error feedback: not exact; the second moment is frozen after a warm-up of "
        "plain Adam, which sends everything.",
    )  # fmt: skip
    yield _Compression(
        f"top-k {KEPT:.0%}", 8 * KEPT, "all_gather", 24.0, 4.0,
        "Only the largest 1 % of each gradient is sent, the rest waits as an error: not exact; what comes late slows "
        "convergence, and the share must start higher.",
    )  # fmt: skip
    yield _Compression(
        f"PowerSGD rank {RANK}", factor_bytes(result.work.model, int(winner.tensor[0])), "all_reduce", 24.0, 4.0,
        f"Each matrix's gradient becomes a product of rank {RANK}, with error feedback: not exact; too low a rank costs "
        "quality, so it must be tuned.",
    )  # fmt: skip


@cache
def factor_bytes(model: Model, tensor: int = 1) -> float:
    """Bytes a parameter of PowerSGD: (rows + columns) x rank x 4 for each matrix on a tensor device, where that is less than the
    matrix itself, and vectors as they are.
    """
    sent = 0.0
    for shape in parameter_shapes(model).values():
        size = prod(shape) / tensor
        if len(shape) == 1:
            sent += 4 * size
            continue
        long, short = max(shape[-2:]) / tensor, min(shape[-2:])
        sent += 4 * min(size, prod(shape[:-2]) * RANK * (long + short))
    return sent / sum(prod(shape) / tensor for shape in parameter_shapes(model).values())


def _compressed(result: SearchResult, winner: Space, how: _Compression) -> Alternative:
    parameters = float(hold(result.work, winner, SHARDWISE).parameters[0])
    width = _width(winner, how)
    moved = np.asarray([how.traffic * parameters])  # (1,): one candidate
    passes = float(compute.streamed(moved, winner, result.cluster)[0]) * _reductions(result, winner)
    prediction = predict(result.work, winner, result.cluster, replace(SHARDWISE, reduce_bytes=width))
    extra = how.error * parameters
    return Alternative(
        how.name,
        bytes_per_step=_sent(result, winner, width),
        exposed_seconds=_waiting(prediction) + passes,
        step_seconds=_step(result, winner, prediction) + passes,
        extra_memory=extra,
        fits=bool(result.peak[result.order[0]] + extra <= result.limit),
        changes=f"{how.changes} {_PLANNED}",
    )


def _step(result: SearchResult, winner: Space, prediction: Prediction) -> float:
    """The winner's step, with what the closed forms say that another prediction changes."""
    plain = predict(result.work, winner, result.cluster, SHARDWISE)
    return float(result.total[result.order[0]] + prediction.total[0] - plain.total[0])


def _waiting(prediction: Prediction) -> float:
    """Exposed seconds of the data axis in a step."""
    return float(sum(prediction.seconds[name][0] for name in _DATA))


def _width(space: Space, how: _Compression) -> float:
    """Bytes a value at which the layout's own collective sends as much: a sum that every device gets whole is twice what one that
    leaves each its shard is, and a gather is a message from each.
    """
    sharded = bool(space.zero[0]) and int(space.shards[0]) > 1
    if how.collective == "same":
        return how.bytes_per_value
    twice = 2.0 if sharded else 1.0
    if how.collective == "all_reduce":
        return twice * how.bytes_per_value
    return twice / 2 * how.bytes_per_value * int(space.shards[0] * space.replica[0])


def _reductions(result: SearchResult, space: Space) -> int:
    """How often a step reduces its gradients: once, or for each micro-batch where no device keeps them whole."""
    return int(space.accumulation[0]) if engine_of(space, result.work.model.experts).reduces_each[0] else 1


def _sent(result: SearchResult, space: Space, width: float) -> float:
    """Bytes that one device sends a step to agree on gradients of so many bytes a value: the reductions among its flows."""
    stack = replace(SHARDWISE, reduce_bytes=width)
    sums = [
        flow.bytes * wire_factor(flow.kind, devices(flow.axis, space).astype(float))
        for flow in flows(result.work, space, stack, result.cluster.device_type)
        if flow.kind in ("reduce_scatter", "all_reduce") and axis_of(flow) in _DATA and flow.when != "step"
    ]
    return float(sum(sums, np.zeros(1))[0])


# -- local training -----------------------------------------------------------------------------------------------------


def _local(result: SearchResult, winner: Space) -> Iterator[Alternative]:
    """DiLoCo with the smallest workers that hold the model, if any that are less than all devices do."""
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
        f"DiLoCo, {count} workers",
        bytes_per_step=_sent(result, worker, SHARDWISE.reduce_bytes) + averaged,
        exposed_seconds=_waiting(prediction) + outer,
        step_seconds=_step(result, winner, prediction) + outer,
        extra_memory=max(0.0, float(prediction.peak[0] - result.peak[result.order[0]]) + _OUTER_BYTES * share),
        fits=True,
        changes=f"{count} workers train alone and average parameters every {OUTER_EVERY} steps: another algorithm, with an outer "
        f"momentum to tune; many workers or long rounds end at a higher loss. {_PLANNED}",
    )


def _smallest_worker(result: SearchResult, winner: Space) -> Space | None:
    """The winner's layout on as few data-parallel devices as hold it: at least those that share a node, less than all."""
    copies, inner = int(winner.data[0] * winner.replica[0]), int(winner.tensor[0] * winner.context[0])
    node = result.cluster.devices_per_node
    for size in divisors(copies)[:-1]:
        if size * inner < node < copies * inner:
            continue  # inside a node links are quick: no need to do without
        worker = replace(winner, data=np.asarray([size]), replica=np.asarray([1]))
        if int(worker.shards[0]) == 1:
            worker = replace(worker, zero=np.asarray([0]))
        peak = float(predict(result.work, worker, result.cluster, SHARDWISE).peak[0])
        if peak + _OUTER_BYTES * _share(result, worker) <= result.limit:
            return worker
    return None


def _share(result: SearchResult, worker: Space) -> float:
    """Parameters that one device of a worker averages with its like in the other workers."""
    parameters = float(hold(result.work, worker, SHARDWISE).parameters[0])
    return parameters / (int(worker.shards[0]) if worker.zero[0] else 1)
