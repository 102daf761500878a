"""Hands portions of the data to the workers of a parameter server, and puts updates together.

Who computes what next is decided in portions.py, without clock or threads. The scheduler adds both: workers
ask and bring from a thread each, wait where there is nothing to do, and lose a portion that takes too long.
It runs in the first server.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.asynchronous import messages
from shardwise.asynchronous.gradient_store import Key
from shardwise.asynchronous.portions import Contribution, Portions, State

log = logging.getLogger("shardwise")

ASK_SECONDS = 1.0
"""How long a worker that asks waits before it is told to ask again."""
PATIENCE = 0.5
"""A worker waits for weights that are about to come for at most this share of the time of a portion."""
OVERDUE, SHORTEST_OVERDUE = 20.0, 20.0
"""A portion that takes this many times as long as usual, and at least this many seconds, goes to another
worker."""


@dataclass(frozen=True)
class Update:
    """What the next update is made of: the contributions, and the sums of what workers reported."""

    contributions: tuple[Contribution, ...]
    staleness: tuple[int, ...]
    loss: float
    """The sum of the losses of all items."""
    items: float
    tokens: int
    checksum: int
    brought: tuple[Key, ...]
    """Gradients that count in a later update."""
    dropped: tuple[Key, ...]
    """Gradients that do not count at all."""

    @property
    def keys(self) -> list[Key]:
        """The keys of its gradients."""
        return [(one.worker, one.portion) for one in self.contributions]


class Scheduler:
    """Workers ask it for portions and bring them back; the server waits here for the next update.

    A worker that asks just before an update is made would read weights that are old at once. So it waits for
    a while if the missing gradients should be there within that time, going by how long their workers took
    before.
    """

    def __init__(self, work: Portions, clock: Callable[[], float] = time.monotonic) -> None:
        self.work, self._clock = work, clock
        self._changed = threading.Condition()
        self._reported: dict[int, messages.Bring] = {}
        """By portion, what workers reported of those that are brought and not used yet."""
        self._since: dict[Key, float] = {}
        self._took: deque[float] = deque(maxlen=64)
        """Seconds from asking to bringing, of the last portions."""
        self._usual: dict[str, float] = {}
        """The same for the last portion of each worker."""
        self._patient_until: dict[str, float] = {}
        """Until when workers wait for weights that are about to come."""
        self._dropped: list[Key] = []
        self._cut_off: set[str] = set()
        """Workers whose portion went to another. They must come back under another name: otherwise gradients
        that they push before and after could be confused."""
        self._closed = False

    def ask(self, worker: str, seconds: float = ASK_SECONDS) -> messages.Task | messages.Wait | messages.End:
        """Return what this worker is to do, as soon as there is something, within this many seconds."""
        deadline = self._clock() + seconds
        with self._changed:
            while not self.work.ended:
                self._check(worker)
                now = self._clock()
                patient = self._patience(worker, now)
                portion = None if patient else self.work.ask(worker)
                if portion is not None:
                    self._since = {key: when for key, when in self._since.items() if key[0] != worker}
                    self._since[worker, portion] = now
                    self._patient_until.pop(worker, None)
                    return messages.Task(portion, self.work.version)
                if deadline <= now:
                    return messages.Wait()
                self._changed.wait(min(deadline - now, patient or math.inf))
            return messages.End()

    def bring(self, worker: str, report: messages.Bring) -> bool:
        """Take note of a portion that a worker has pushed; return whether it counts."""
        with self._changed:
            self._check(worker)
            counts = self.work.bring(worker, report.portion)
            if counts:
                self._reported[report.portion] = report
                self._usual[worker] = self._clock() - self._since[worker, report.portion]
                self._took.append(self._usual[worker])
            else:
                self._dropped.append((worker, report.portion))
            self._since.pop((worker, report.portion), None)
            self._changed.notify_all()
            return counts

    def lost(self, worker: str) -> None:
        """The connection of this worker has ended."""
        with self._changed:
            self._forget(worker)
            self._cut_off.discard(worker)

    def is_due(self) -> bool:
        """Return whether the next update can be made."""
        with self._changed:
            return self.work.due() is not None

    def due(self, seconds: float) -> Update | None:
        """Return the next update; None: it cannot be made within this many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (used := self.work.due()) is None:
                self._reassign_overdue()
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
            reports = [self._reported[one.portion] for one in used]
            keys = {one.portion for one in used}
            brought = tuple(
                (one.worker, one.portion) for one in self.work.unused() if one.portion not in keys
            )
            dropped, self._dropped = tuple(self._dropped), []
            return Update(
                contributions=tuple(used),
                staleness=tuple(self.work.staleness(used)),
                loss=math.fsum(one.loss for one in reports),
                items=math.fsum(one.items for one in reports),
                tokens=sum(one.tokens for one in reports),
                checksum=sum(one.checksum for one in reports),
                brought=brought,
                dropped=dropped,
            )

    def made(self, update: Update) -> None:
        """The update is made, and every server has published the new weights."""
        with self._changed:
            self.work.update(list(update.contributions))
            for one in update.contributions:
                del self._reported[one.portion]
            self._changed.notify_all()

    def state(self) -> State:
        """Return what of the data is in the weights of the last update."""
        with self._changed:
            return self.work.state()

    def close(self) -> None:
        """Raise in all threads of workers that ask."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _patience(self, worker: str, now: float) -> float:
        """Return for how many seconds the worker had better wait for the next weights."""
        usual = self._usual.get(worker)
        if usual is None or self.work.most_stale == 0:  # then weights are never old
            return 0.0
        until = self._patient_until.setdefault(worker, now + PATIENCE * usual)
        return until - now if until > now and self._next_version_by(now) <= until else 0.0

    def _next_version_by(self, now: float) -> float:
        """Return when all gradients of the next update should be here; late ones are expected at once."""
        lacking = self.work.portions - len(self.work.unused())
        if lacking <= 0:
            return now  # it is being made
        due = sorted(
            max(now, since + self._usual.get(worker, math.inf)) for (worker, _), since in self._since.items()
        )
        return due[lacking - 1] if len(due) >= lacking else math.inf

    def _reassign_overdue(self) -> None:
        if not self._took:
            return
        limit, now = max(SHORTEST_OVERDUE, OVERDUE * statistics.median(self._took)), self._clock()
        for worker in {worker for (worker, _), since in self._since.items() if now - since > limit}:
            log.warning("worker %s was not heard of for %.0f s: another does its portion", worker, limit)
            self._forget(worker)
            self._cut_off.add(worker)

    def _check(self, worker: str) -> None:
        if self._closed:
            raise EOFError("the server ends")
        if worker in self._cut_off:
            raise EOFError("it was not heard of for long")

    def _forget(self, worker: str) -> None:
        self.work.lost(worker)
        self._since = {key: when for key, when in self._since.items() if key[0] != worker}
        for known in (self._usual, self._patient_until):
            known.pop(worker, None)
        self._changed.notify_all()
