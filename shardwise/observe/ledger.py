"""A ledger of collectives: how often each kind ran over each mesh axis, and how many bytes it moved.

The convention is the same for every kind: **bytes are the size of the full tensor**, the one that a single
device would hold.

| kind           | bytes                | a ring of N devices puts on the wire, per device |
| -------------- | -------------------- | ------------------------------------------------ |
| all_reduce     | the tensor           | 2 (N - 1) / N times that                         |
| all_gather     | the gathered output  | (N - 1) / N times that                           |
| reduce_scatter | the full input       | (N - 1) / N times that                           |
| broadcast      | the tensor           | once that                                        |

Compressed collectives count the bytes that are sent, and also the bytes before compression (`plain`).

The volume on the wire is therefore a known multiple of these bytes, and the ledger of a layout can be
compared with its formula without knowing which algorithm the backend chose.

On CPU workers every collective also has a start and an end. The part of that time for which the training
thread was not blocked was hidden behind computing. On GPUs collectives run on streams, and their times are
not known here. Recording costs a lock, a few additions and reading the clock twice (some microseconds).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from shardwise.observe.intervals import Interval, joined, length, without

Counts = dict[str, dict[str, int]]
"""From `"kind/axis"` to `{"count": n, "bytes": b}`, sorted by key, as in a line of metrics.jsonl. There is
also `"plain"` if some are compressed.
"""

AxisTimes = dict[str, dict[str, float]]
"""For each axis, the `seconds` of a step in which a collective was running, and how many of them were
`hidden`.
"""


@dataclass
class Collective:
    """One collective that has begun."""

    kind: str
    axis: str
    bytes: int
    plain: int | None
    """Bytes before compression; None if it is not compressed."""
    start: float = field(default_factory=perf_counter)
    ended: float | None = None
    """Time at which it ended; None if it has not, or if that is not known."""

    def end(self) -> None:
        """Record the end. It may be called from any thread, and more than once: the first call counts."""
        if self.ended is None:
            self.ended = perf_counter()


class Ledger:
    """Counts collectives. Any thread may record into it, because autograd runs its hooks on its own
    threads.
    """

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        """Whether the ends of collectives can be known."""
        self._lock = threading.Lock()
        self._recent: Counts = {}
        self._begun: list[Collective] = []
        self.last = "none yet"
        """Description of the last collective that began, for reports of hangs."""
        self.taken: list[Collective] = []
        """Collectives of the step that was taken last."""

    def record(self, kind: str, axis: str, bytes: int, plain: int | None = None) -> Collective:
        """Record that a collective begins, on a full tensor of this size. `plain` is the size before
        compression.
        """
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
        """Return what was recorded since the last call: the collectives of one step."""
        with self._lock:
            recent, self._recent = self._recent, {}
            self.taken, self._begun = self._begun, []
        return dict(sorted(recent.items()))


def axis_times(collectives: Iterable[Collective], waits: Sequence[Interval]) -> AxisTimes:
    """Return how long collectives of each axis were running, and how much of that was hidden.

    Hidden is the time in which the training thread did not wait.
    """
    busy: dict[str, list[Interval]] = {}
    for collective in collectives:
        if collective.ended is not None:
            busy.setdefault(collective.axis, []).append((collective.start, collective.ended))
    stretches = {axis: joined(intervals) for axis, intervals in sorted(busy.items())}
    return {
        axis: {"seconds": length(running), "hidden": length(without(running, waits))}
        for axis, running in stretches.items()
    }
