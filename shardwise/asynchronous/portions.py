"""Decides for a parameter server which worker computes what next, and which gradients make the next update.

The training data is a row of *portions*; a fixed number of them make a global batch. A worker asks, is handed
the next portion, reads the weights, and brings the gradient of that portion. As many gradients as there are
portions in a batch make an *update*; the number of updates made is the *version* of the weights. The
*staleness* of a gradient is the version that it is applied to minus the version that it was computed with.

A bound on staleness gives every portion a deadline: what was read at version v has to be in update v + bound
at the latest. The earliest deadlines go first, and an update waits if without it too many portions would be
left for the updates that remain to them. With a bound of 0 a portion of the next batch is handed out only
when all of this one are in: that is synchronous training, whoever computes what.

Where servers are slower than workers, gradients would pile up in front of the servers and grow old there, and
no update would be made sooner. So nothing is handed out while all gradients of the update after the next are
there already, with a bound or without.

A portion counts once. Those of a worker that is lost are handed out again before any other. Where `again` is
set, a worker that would have to wait computes a portion that another has not brought yet, and the first to
come counts: nobody waits for a slow worker, and no data are dropped for it.

This module has no clock, no process and no socket, so a test can try every order of events, and replay it.
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
    """What a checkpoint holds of a server's work: portions below `next_portion` are in the weights, except
    for those that are missing."""

    version: int = 0
    next_portion: int = 0
    missing: tuple[int, ...] = ()


@dataclass
class Portions:
    """The portions of one run: handed out, brought, and used."""

    portions: int
    """Number of portions that make an update."""
    updates: int
    """Number of updates of the whole run."""
    most_stale: int | None
    """Largest staleness of a gradient; None: there is no bound."""
    again: bool = False
    """Whether a worker that would have to wait computes a portion that another has not brought yet."""
    start: State = field(default_factory=State)
    late: int = 0
    """Gradients that came after another of the same portion, and were dropped."""

    def __post_init__(self) -> None:
        self.version, self._next = self.start.version, self.start.next_portion
        self._missing = sorted(self.start.missing)
        self._out: dict[int, dict[Worker, int]] = {}
        """By portion under way, the version that each of its workers reads. In the order in which portions
        were first handed out."""
        self._brought: dict[int, Contribution] = {}

    @property
    def ended(self) -> bool:
        """Whether every update is made."""
        return self.version >= self.updates

    def state(self) -> State:
        """Return the state from which a run continues with the weights of this version."""
        return State(self.version, self._next, tuple(sorted([*self._missing, *self._out, *self._brought])))

    def ask(self, worker: Worker) -> int | None:
        """Return the portion that this worker is to compute, with the present weights or newer ones; None:
        there is none for now."""
        self.lost(worker)  # what it was handed before, it no longer computes
        if len(self._brought) >= 2 * self.portions:  # one update that may be in the making, and the next
            return None
        pending = len(self._out) + len(self._brought)
        if pending < self._room():
            portion = self._missing.pop(0) if self._missing else self._take_next()
            self._out[portion] = {worker: self.version}
            return portion
        return self._copied(worker) if self.again else None

    def bring(self, worker: Worker, portion: int) -> bool:
        """A worker has computed a portion. Return whether it counts."""
        version = self._out.get(portion, {}).get(worker)
        if version is None:
            self.late += 1
            return False
        del self._out[portion]
        self._brought[portion] = Contribution(portion, worker, version)
        return True

    def lost(self, worker: Worker) -> None:
        """Take back a worker's portions, unless another computes them too. What it has brought counts."""
        for portion, on_it in list(self._out.items()):
            on_it.pop(worker, None)
            if not on_it:
                del self._out[portion]
                self._missing = sorted([*self._missing, portion])

    def due(self) -> list[Contribution] | None:
        """Return the contributions of the next update, by portion; None: it has to wait."""
        if len(self._brought) < self.portions or self.ended:
            return None
        by_deadline = sorted(self._brought.values(), key=lambda one: (one.version, one.portion))
        used, rest = by_deadline[: self.portions], by_deadline[self.portions :]
        left = [one.version for one in rest] + [min(on_it.values()) for on_it in self._out.values()]
        return sorted(used, key=lambda one: one.portion) if self._in_time(left) else None

    def update(self, used: list[Contribution]) -> None:
        """These contributions are in the weights now."""
        for one in used:
            del self._brought[one.portion]
        self.version += 1

    def unused(self) -> list[Contribution]:
        """Return the contributions that are in no update yet."""
        return list(self._brought.values())

    def staleness(self, used: list[Contribution]) -> list[int]:
        """Return the staleness of each of these contributions in the next update."""
        return [self.version - one.version for one in used]

    def _room(self) -> int:
        """Return how many portions may be under way or brought: as many as can be used before the newest is
        too stale, and before the run ends."""
        ahead = self.updates - self.version
        return self.portions * (ahead if self.most_stale is None else min(ahead, self.most_stale + 1))

    def _take_next(self) -> int:
        self._next += 1
        return self._next - 1

    def _copied(self, worker: Worker) -> int | None:
        """Return a portion that the fewest others compute, the longest; it reads the same weights as they
        do."""
        alike = [portion for portion, on_it in self._out.items() if min(on_it.values()) == self.version]
        portion = min(alike, key=lambda one: len(self._out[one]), default=None)
        if portion is not None:
            self._out[portion][worker] = self.version
        return portion

    def _in_time(self, left: list[int]) -> bool:
        """Return whether gradients of these versions can be used in time by the updates after the next."""
        if self.most_stale is None:
            return True
        count = 0
        for version, reads in sorted(Counter(left).items()):
            count += reads
            if count > self.portions * (version + self.most_stale - self.version):
                return False
        return True
