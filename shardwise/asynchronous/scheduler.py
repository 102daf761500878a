"""Hands portions of the data to the workers of a parameter server, and assembles updates.

portions.py decides which worker computes what next, without clock or threads. The scheduler adds both: the
thread of a worker waits here if there is nothing to do, and a portion that takes too long goes to another
worker. The scheduler runs in the first server.
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
"""Seconds that a worker waits for a portion before it is told to ask again."""
PATIENCE = 0.5
"""Longest wait of a worker for new weights, as a share of the time that it takes for a portion."""
OVERDUE, SHORTEST_OVERDUE = 20.0, 20.0
"""A portion goes to another worker if it takes this many times as long as usual, and at least this many
seconds."""


@dataclass(frozen=True)
class Update:
    """The contributions of the next update, and the sums of what their workers reported."""

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
        return [(contribution.worker, contribution.portion) for contribution in self.contributions]


class Scheduler:
    """Workers ask for portions and bring them back; the server waits for the next update.

    A worker that asks just before an update would read weights that are soon old. So it waits for a while if
    the missing gradients are expected within that time, by how long their workers took before.
    """

    def __init__(self, work: Portions, clock: Callable[[], float] = time.monotonic) -> None:
        self.work, self._clock = work, clock
        self._changed = threading.Condition()
        self._reported: dict[int, messages.Bring] = {}
        """Reports of workers by portion, for portions that are brought and not used yet."""
        self._since: dict[Key, float] = {}
        """Time at which each portion was handed out."""
        self._took: deque[float] = deque(maxlen=64)
        """Seconds from asking to bringing, for the last portions."""
        self._usual: dict[str, float] = {}
        """Seconds from asking to bringing, for the last portion of each worker."""
        self._patient_until: dict[str, float] = {}
        """Time until which each worker waits for new weights."""
        self._dropped: list[Key] = []
        self._cut_off: set[str] = set()
        """Workers whose portion went to another worker. They must return under another name, so that earlier
        gradients of theirs are not confused with later ones."""
        self._closed = False

    def ask(self, worker: str, seconds: float = ASK_SECONDS) -> messages.Task | messages.Wait | messages.End:
        """Return this worker's next task as soon as there is one, or `Wait` after this many seconds."""
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
        """Note a portion that a worker has pushed. Return whether it counts."""
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
        """Note that the connection of this worker has ended."""
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
            return self._assemble(used)

    def _assemble(self, used: list[Contribution]) -> Update:
        reports = [self._reported[contribution.portion] for contribution in used]
        later = [contribution for contribution in self.work.unused() if contribution not in used]
        dropped, self._dropped = tuple(self._dropped), []
        return Update(
            contributions=tuple(used),
            staleness=tuple(self.work.staleness(used)),
            loss=math.fsum(report.loss for report in reports),
            items=math.fsum(report.items for report in reports),
            tokens=sum(report.tokens for report in reports),
            checksum=sum(report.checksum for report in reports),
            brought=tuple((contribution.worker, contribution.portion) for contribution in later),
            dropped=dropped,
        )

    def made(self, update: Update) -> None:
        """Note that the update is made, and that every server has published the new weights."""
        with self._changed:
            self.work.update(list(update.contributions))
            for contribution in update.contributions:
                del self._reported[contribution.portion]
            self._changed.notify_all()

    def state(self) -> State:
        """Return which portions are in the weights of the last update."""
        with self._changed:
            return self.work.state()

    def close(self) -> None:
        """Raise in all threads of workers that ask."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _patience(self, worker: str, now: float) -> float:
        """Return how many seconds the worker should wait for the next weights."""
        usual = self._usual.get(worker)
        if usual is None or self.work.max_staleness == 0:  # then weights are never old
            return 0.0
        until = self._patient_until.setdefault(worker, now + PATIENCE * usual)
        return until - now if until > now and self._next_version_by(now) <= until else 0.0

    def _next_version_by(self, now: float) -> float:
        """Return when all gradients of the next update should have arrived; overdue ones are expected now."""
        lacking = self.work.portions - len(self.work.unused())
        if lacking <= 0:
            return now  # the update is being made
        due = sorted(
            max(now, since + self._usual.get(worker, math.inf)) for (worker, _), since in self._since.items()
        )
        return due[lacking - 1] if len(due) >= lacking else math.inf

    def _reassign_overdue(self) -> None:
        if not self._took:
            return
        limit, now = max(SHORTEST_OVERDUE, OVERDUE * statistics.median(self._took)), self._clock()
        for worker in {worker for (worker, _), since in self._since.items() if now - since > limit}:
            log.warning(
                "worker %s sent nothing for %.0f s: another worker computes its portion", worker, limit
            )
            self._forget(worker)
            self._cut_off.add(worker)

    def _check(self, worker: str) -> None:
        if self._closed:
            raise EOFError("the server ends")
        if worker in self._cut_off:
            raise EOFError("it sent nothing for too long")

    def _forget(self, worker: str) -> None:
        self.work.release(worker)
        self._since = {key: when for key, when in self._since.items() if key[0] != worker}
        for times in (self._usual, self._patient_until):
            times.pop(worker, None)
        self._changed.notify_all()
