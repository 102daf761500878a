"""A ledger of collectives: how often each kind ran over each mesh axis, and how many bytes it moved.

The convention, the same for every kind: **bytes are the size of the full tensor**, the one a single device
would hold.

| kind           | bytes                | a ring of N devices puts on the wire, per device |
| -------------- | -------------------- | ------------------------------------------------ |
| all_reduce     | the tensor           | 2 (N - 1) / N times that                         |
| all_gather     | the gathered output  | (N - 1) / N times that                           |
| reduce_scatter | the full input       | (N - 1) / N times that                           |
| broadcast      | the tensor           | once that                                        |

Compressed collectives count the bytes that are sent, and beside them those of the numbers they stand for
(`plain`).

So the volume on the wire is a known factor of what is written here, and a layout's ledger can be compared
with its formula without knowing which algorithm the backend picked.

On CPU workers every collective also has a start and an end. What of that time the training thread did not
stand still for was hidden behind computing. On GPUs collectives run on streams, and their times are not known
here. Recording costs a lock, a few additions and two looks at the clock (some microseconds).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from shardwise.observe.intervals import Interval, joined, length, without

Counts = dict[str, dict[str, int]]
"""`"kind/axis"` to `{"count": n, "bytes": b}`, with `"plain"` where some are compressed, sorted by key: what
goes into a line of metrics.jsonl."""

AxisTimes = dict[str, dict[str, float]]
"""By axis, for how many `seconds` of a step something was under way, and for how many of them it was
`hidden`."""


@dataclass
class Collective:
    """One collective that has begun."""

    kind: str
    axis: str
    bytes: int
    plain: int | None
    start: float = field(default_factory=perf_counter)
    ended: float | None = None
    """None: it is not over, or nobody knows when it was."""

    def end(self) -> None:
        """It is over. May be called from any thread, and more than once: the first time counts."""
        if self.ended is None:
            self.ended = perf_counter()


class Ledger:
    """Counts collectives. Safe to record into from any thread: autograd runs its hooks on threads of its
    own."""

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        """Whether the ends of collectives can be known."""
        self._lock = threading.Lock()
        self._recent: Counts = {}
        self._begun: list[Collective] = []
        self.last = "none yet"
        self.taken: list[Collective] = []
        """Those of the step that was taken last."""

    def record(self, kind: str, axis: str, bytes: int, plain: int | None = None) -> Collective:
        """One collective of this kind over this axis begins, on a full tensor of so many bytes; `plain`:
        before compression."""
        key = f"{kind}/{axis}"
        collective = Collective(kind, axis, bytes, plain)
        with self._lock:
            self.last = f"{kind} over {axis}, {bytes} bytes"
            entry = self._recent.setdefault(key, {"count": 0, "bytes": 0})
            entry["count"] += 1
            if plain is not None or "plain" in entry:
                entry["plain"] = entry.get("plain", entry["bytes"]) + (bytes if plain is None else plain)
            entry["bytes"] += bytes
            if self.timed:
                self._begun.append(collective)
        return collective

    def take(self) -> Counts:
        """What was recorded since the last `take`: the collectives of one step."""
        with self._lock:
            recent, self._recent = self._recent, {}
            self.taken, self._begun = self._begun, []
        return dict(sorted(recent.items()))


def axis_times(collectives: Iterable[Collective], waits: Sequence[Interval]) -> AxisTimes:
    """How long the axes were busy, and how much of that was hidden from a training thread that waited
    then."""
    busy: dict[str, list[Interval]] = {}
    for collective in collectives:
        if collective.ended is not None:
            busy.setdefault(collective.axis, []).append((collective.start, collective.ended))
    stretches = {axis: joined(intervals) for axis, intervals in sorted(busy.items())}
    return {
        axis: {"seconds": length(own), "hidden": length(without(own, waits))}
        for axis, own in stretches.items()
    }
