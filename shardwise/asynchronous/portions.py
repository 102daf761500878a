"""Decides for a parameter server which worker computes what next, and which gradients make the next update.

The training data is a sequence of *portions*; a fixed number of them make a global batch. A worker asks for a
portion, gets the next one, reads the weights, and brings the gradient of that portion. As many gradients as
there are portions in a batch make an *update*; the number of updates made is the *version* of the weights.
The *staleness* of a gradient is the version that it is applied to minus the version it was computed with.

A bound on staleness gives every portion a deadline: a gradient of weights of version v has to be in update
v + bound at the latest. The earliest deadlines go first, and an update waits if too many portions would be
left for the updates before their deadlines. With a bound of 0, portions of the next batch are handed out only
when this batch is complete: that is synchronous training, whichever worker computes which portion.

If servers are slower than workers, gradients would pile up at the servers and become stale, and updates would
not be made sooner. So no portion is handed out while the gradients of the next two updates have all arrived,
with a bound or without.

A portion counts once. Portions of a lost worker are handed out again before any other. If `backups` is set, a
worker that would have to wait computes a portion that another has not brought yet, and the first gradient
counts: then no worker waits for a slow worker, and no data are dropped because of it.

This module uses no clock, no process and no socket, so a test can try every order of events, and repeat it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Worker = str


@dataclass(frozen=True)
class Contribution:
    """A gradient that a worker brought, and the version of the weights that it was computed with."""

    portion: int
    worker: Worker
    version: int


@dataclass(frozen=True)
class State:
    """The part of a checkpoint that tells which portions are in the weights: all below `next_portion`, except
    those that are missing."""

    version: int = 0
    next_portion: int = 0
    missing: tuple[int, ...] = ()


@dataclass
class Portions:
    """The portions of a run that are handed out, brought back, and used."""

    portions: int
    """Number of portions that make an update."""
    updates: int
    """Number of updates of the whole run."""
    max_staleness: int | None
    """Largest staleness of a gradient; None: there is no bound."""
    backups: bool = False
    """Whether a worker that would have to wait computes a portion that another has not brought yet."""
    start: State = field(default_factory=State)
    dropped: int = 0
    """Number of gradients that were dropped because another worker had brought the same portion."""

    def __post_init__(self) -> None:
        self.version, self._next_portion = self.start.version, self.start.next_portion
        self._unassigned = sorted(self.start.missing)
        """Portions before the next one that no worker computes or has brought."""
        self._in_progress: dict[int, dict[Worker, int]] = {}
        """For each portion that is being computed, the version that each of its workers reads; in the order
        in which portions were first handed out."""
        self._arrived: dict[int, Contribution] = {}
        """Contributions that are in no update yet, by portion."""

    @property
    def ended(self) -> bool:
        """Whether every update is made."""
        return self.version >= self.updates

    def state(self) -> State:
        """Return the state from which a run continues with the weights of this version."""
        missing = sorted([*self._unassigned, *self._in_progress, *self._arrived])
        return State(self.version, self._next_portion, tuple(missing))

    def ask(self, worker: Worker) -> int | None:
        """Return the portion that this worker should compute, with the present weights or newer ones; None:
        there is none for now."""
        self.release(worker)  # it no longer computes its last portion
        if len(self._arrived) >= 2 * self.portions:  # all gradients of the next two updates
            return None
        pending = len(self._in_progress) + len(self._arrived)
        if pending < self._capacity():
            portion = self._unassigned.pop(0) if self._unassigned else self._take_next()
            self._in_progress[portion] = {worker: self.version}
            return portion
        return self._backup_portion(worker) if self.backups else None

    def bring(self, worker: Worker, portion: int) -> bool:
        """Note that a worker has computed a portion. Return whether it counts."""
        version = self._in_progress.get(portion, {}).get(worker)
        if version is None:
            self.dropped += 1
            return False
        del self._in_progress[portion]
        self._arrived[portion] = Contribution(portion, worker, version)
        return True

    def release(self, worker: Worker) -> None:
        """Take back the portions that only this worker computes. Portions it has brought still count."""
        for portion, readers in list(self._in_progress.items()):
            readers.pop(worker, None)
            if not readers:
                del self._in_progress[portion]
                self._unassigned = sorted([*self._unassigned, portion])

    def due(self) -> list[Contribution] | None:
        """Return the contributions of the next update, in the order of portions; None: it has to wait."""
        if len(self._arrived) < self.portions or self.ended:
            return None
        by_deadline = sorted(self._arrived.values(), key=lambda each: (each.version, each.portion))
        used, rest = by_deadline[: self.portions], by_deadline[self.portions :]
        left = [each.version for each in rest]
        left += [min(readers.values()) for readers in self._in_progress.values()]
        return sorted(used, key=lambda each: each.portion) if self._in_time(left) else None

    def update(self, used: list[Contribution]) -> None:
        """Note that these contributions are in the weights now."""
        for contribution in used:
            del self._arrived[contribution.portion]
        self.version += 1

    def unused(self) -> list[Contribution]:
        """Return the contributions that are in no update yet."""
        return list(self._arrived.values())

    def staleness(self, used: list[Contribution]) -> list[int]:
        """Return the staleness of each of these contributions in the next update."""
        return [self.version - contribution.version for contribution in used]

    def _capacity(self) -> int:
        """Return how many portions may be computed or brought at a time: as many as can be used before the
        newest is too stale, and before the run ends."""
        ahead = self.updates - self.version
        return self.portions * (ahead if self.max_staleness is None else min(ahead, self.max_staleness + 1))

    def _take_next(self) -> int:
        """Return the next portion of the data, and go on to the one after it."""
        self._next_portion += 1
        return self._next_portion - 1

    def _backup_portion(self, worker: Worker) -> int | None:
        """Give this worker a portion that others are computing with the present weights: the one with the
        fewest workers, and the oldest of these. None: there is none."""
        same = [
            portion for portion, readers in self._in_progress.items() if min(readers.values()) == self.version
        ]
        portion = min(same, key=lambda portion: len(self._in_progress[portion]), default=None)
        if portion is not None:
            self._in_progress[portion][worker] = self.version
        return portion

    def _in_time(self, left: list[int]) -> bool:
        """Return whether gradients of these versions can be used in time by the updates after the next."""
        if self.max_staleness is None:
            return True
        count = 0
        for version, reads in sorted(Counter(left).items()):
            count += reads
            if count > self.portions * (version + self.max_staleness - self.version):
                return False
        return True
