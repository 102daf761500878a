"""Scaling curves: the best layout on each of several device counts, its efficiency, and which term limits it.

*Strong* scaling trains the same global batch on more devices: each has less to do, and what does not shrink
(exposed communication, the update, the pipeline's bubble) is a growing part of the step. *Weak* scaling gives
each device the same work, so the global batch grows with the devices. Every count gets its own search: the
best layout on 8 devices is seldom the best on 4,096.

Efficiency is tokens per second and device, over that of the smallest count on which the job works. It may be
above 1: with more devices each has more free memory, and recomputation or offloading may no longer be needed.
The term that breaks a curve is the one whose part of the step grew most since that smallest count.

No bound like that of Amdahl's law is given. It needs a part of the step that more devices cannot shorten.
With another layout on each count every part can be shortened: sums by sharding, the bubble by fewer stages,
the update by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.config import Config
from shardwise.cost.cluster import Cluster
from shardwise.errors import UserError
from shardwise.search.reasons import best_layout, nothing_fits
from shardwise.search.search import search

_PRODUCTS = ("matmul", "attention")
"""The useful terms of a step. They never count as the term that breaks a curve, because their part grows
where the rest gets better."""


@dataclass(frozen=True)
class ScalingPoint:
    """One device count of a curve: what its best layout does, or why there is none."""

    devices: int
    global_batch: int | None
    """Sequences per step; None if the batch cannot be divided as asked."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None
    """Tokens per second and device, over those of the smallest count that works."""
    layout: str | None = None
    breaks: str | None = None
    """The term whose part of the step grew most since the smallest count that works; None at that count, and
    where none grew."""
    reason: str | None = None
    """Why no layout works on this count; None if one does."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step, by term."""

    @property
    def works(self) -> bool:
        """Whether a layout works on this count."""
        return self.reason is None


def strong(config: Config, cluster: Cluster, counts: Sequence[int]) -> list[ScalingPoint]:
    """Return the curve of the unchanged job over these numbers of devices."""
    return _curve([_point(config, cluster, devices) for devices in _ascending(counts)])


def weak(config: Config, cluster: Cluster, counts: Sequence[int]) -> list[ScalingPoint]:
    """Return the curve of the job with a global batch in proportion to the devices; on the smallest count it
    is the job's own."""
    ascending = _ascending(counts)
    return _curve([_grown(config, cluster, devices, ascending[0]) for devices in ascending])


def _ascending(counts: Sequence[int]) -> list[int]:
    if not counts or any(devices < 1 for devices in counts):
        given = ",".join(map(str, counts)) or "nothing"
        raise UserError(f"scaling over {given} devices: give one or more counts from 1, as in 8,16,32,64")
    return sorted(set(counts))


def _grown(config: Config, cluster: Cluster, devices: int, first: int) -> ScalingPoint:
    batch, rest = divmod(config.train.global_batch * devices, first)
    if rest:
        share = f"{config.train.global_batch} sequences on {first} devices"
        return ScalingPoint(devices, None, reason=f"{share} are not a whole number on {devices}")
    return _point(_with_batch(config, batch), cluster, devices)


def _with_batch(config: Config, batch: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})


def _point(config: Config, cluster: Cluster, devices: int) -> ScalingPoint:
    result = search(config, cluster.with_devices(devices), devices)
    batch = config.train.global_batch
    if not len(result.order):
        return ScalingPoint(devices, batch, reason=nothing_fits(config, result)[0])
    best = int(result.order[0])
    seconds = {name: float(value[0]) for name, value in result.prediction(best).seconds.items()}
    total = sum(seconds.values())
    return ScalingPoint(
        devices, batch, total, result.work.tokens / total, layout=best_layout(result), seconds=seconds
    )


def _curve(points: list[ScalingPoint]) -> list[ScalingPoint]:
    """Return the points with efficiency relative to the first that works."""
    first = next((point for point in points if point.works), None)
    return points if first is None else [_against(first, point) for point in points]


def _against(first: ScalingPoint, point: ScalingPoint) -> ScalingPoint:
    if point.tokens_per_second is None or first.tokens_per_second is None:
        return point
    efficiency = point.tokens_per_second / point.devices / (first.tokens_per_second / first.devices)
    return replace(
        point,
        efficiency=efficiency,
        breaks=_grew_most(first.seconds, point.seconds) if efficiency < 1 else None,
    )


def _grew_most(before: Mapping[str, float], after: Mapping[str, float]) -> str | None:
    """Return the term whose part of the sum grew most, if any grew."""
    old, new = sum(before.values()), sum(after.values())
    growth = {
        name: seconds / new - before.get(name, 0.0) / old
        for name, seconds in after.items()
        if name not in _PRODUCTS
    }
    most = max(growth, key=lambda name: growth[name])
    return most if growth[most] > 1e-9 else None
