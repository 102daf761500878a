"""A ledger of collectives: how often each kind ran over each mesh axis, and how many bytes it moved.

The convention, the same for every kind: **bytes are the size of the full tensor**, the one a single device would hold.

| kind           | bytes                | a ring of N devices puts on the wire, per device |
| -------------- | -------------------- | ------------------------------------------------ |
| all_reduce     | the tensor           | 2 (N - 1) / N times that                         |
| all_gather     | the gathered output  | (N - 1) / N times that                           |
| reduce_scatter | the full input       | (N - 1) / N times that                           |
| broadcast      | the tensor           | once that                                        |

Compressed collectives count the bytes that are sent, and beside them those of the numbers they stand for (`plain`).

So the volume on the wire is a known factor of what is written here, and a layout's ledger can be compared with its formula
without knowing which algorithm the backend picked. Recording costs one lock and two additions (under a microsecond).
"""

from __future__ import annotations

import threading

Counts = dict[str, dict[str, int]]
"""`"kind/axis"` to `{"count": n, "bytes": b}`, with `"plain"` where some are compressed, sorted by key: what goes into a line of
metrics.jsonl."""


class Ledger:
    """Counts collectives. Safe to record into from any thread: autograd runs its hooks on threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[str, dict[str, int]] = {}
        self.last = "none yet"

    def record(self, kind: str, axis: str, bytes: int, plain: int | None = None) -> None:
        """One collective of this kind over this axis, on a full tensor of so many bytes; `plain`: before compression."""
        key = f"{kind}/{axis}"
        with self._lock:
            self.last = f"{kind} over {axis}, {bytes} bytes"
            entry = self._recent.setdefault(key, {"count": 0, "bytes": 0})
            entry["count"] += 1
            if plain is not None or "plain" in entry:
                entry["plain"] = entry.get("plain", entry["bytes"]) + (bytes if plain is None else plain)
            entry["bytes"] += bytes

    def take(self) -> Counts:
        """What was recorded since the last `take`: the collectives of one step."""
        with self._lock:
            recent, self._recent = self._recent, {}
        return dict(sorted(recent.items()))
