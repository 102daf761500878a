"""The faults of a fire drill: which there are, when they come, and how they are injected from outside.

The run takes no part in this. Workers are stopped and killed by their process ids, bytes are flipped on the
disk, and a process is forbidden to write large files. Faults of real machines have the same effects, except
those that need several machines. Only an exception cannot come from outside: workers raise it themselves when
they receive a signal (proof/drilled_worker.py).

    kill     SIGKILL to a worker, as the kernel does when memory runs out: another must take its place
    hang     SIGSTOP to a worker, which is then alive but does no step: it must be noticed and replaced
    error    an exception in a worker, in a place that the seed draws: in a collective, in the creation of a
             process group or of a communicator, or in a save. The other workers wait for it there; they must
             leave, and another worker must take its place
    corrupt  a byte of the newest checkpoint is flipped, then a worker is killed: the run must resume from the
             checkpoint before it
    full     a worker cannot write large files (EFBIG) until a save has failed: the run must not restart, and
             the next save must be complete
    term     SIGTERM to every process, as a scheduler does: the run must save and exit with status 75; when it
             is started again, no step is lost
    lose     a host with one worker disappears at once, and comes back later: the others must go on without
             it, and then take it back

The times are drawn from a seed. The run is divided into as many stretches as there are faults; each fault
comes after a random step of its stretch, and a random fraction of a step later, so that faults also happen
during saves. Steps, ranks, files and bytes are reproducible; the exact moment within a step is not.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardwise.checkpoint import checkpoints
from shardwise.errors import UserError

Kind = Literal["kill", "hang", "error", "corrupt", "full", "term", "lose"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ErrorPlace = Literal["collective", "group", "communicator", "save"]
ERROR_PLACES: tuple[ErrorPlace, ...] = get_args(ErrorPlace)
ERROR_SIGNALS: dict[ErrorPlace, int] = (
    {place: signal.SIGRTMIN + 1 + index for index, place in enumerate(ERROR_PLACES)}
    if sys.platform == "linux"
    else {}
)
"""The signal for each place in which a worker can raise an exception. Real-time signals, which nothing else
here uses; there are none outside Linux."""
SPACING = 3
"""Smallest number of steps from one fault to the next."""
FIRST = 2
"""First step after which a fault may be injected."""
SETTLE_SECONDS = 0.2
"""Seconds without a newer checkpoint, while a worker is stopped, after which no newer one is expected."""
QUIET_SECONDS = 10.0
"""Seconds to wait at most for a moment in which no save is in progress."""
SMALLEST_LIMIT = 1 << 14
"""Smallest limit on the size of files, in bytes. A smaller one would also stop a worker's log."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault to inject: after which step, what fraction of a step later, and the seed for everything else
    that is drawn."""

    kind: Kind
    step: int
    fraction: float
    seed: int


def schedule(
    kinds: Sequence[Kind], count: int, seed: int, steps: int, every: int, room: int = 2
) -> tuple[PlannedFault, ...]:
    """Return the faults of a drill. Kinds take turns in random order, so that each occurs if there are at
    least as many faults as kinds.

    `every` is the number of steps between saves, and `room` the number of steps that must be left after the
    last fault. The loss of a host comes first, and early, because many steps are done before the host is
    back.
    """
    draw = random.Random(seed)
    order: list[Kind] = []
    while len(order) < count:
        order += draw.sample(kinds, len(kinds))
    order = sorted(order[:count], key=lambda kind: kind != "lose")
    needs_saves = "full" in order or "error" in order
    last = steps - max(room, 2 * every + 1 if needs_saves else 0)
    width = (last - FIRST + 1) / count
    if width < SPACING:
        room_for, least = max(0, (last - FIRST + 1) // SPACING), FIRST - 1 + count * SPACING + steps - last
        raise UserError(
            f"--count {count}: {steps} steps have room for {room_for} such faults, {SPACING} apart and "
            f"{steps - last} before the end; give a lower --count, or train.steps={least} or more"
        )
    if "corrupt" in order and FIRST + (len(order) - order[::-1].index("corrupt")) * width <= 2 * every:
        raise UserError(
            f"checkpoint.every = {every}: `corrupt` needs two checkpoints, and comes too early in {steps} "
            f"steps; save more often"
        )
    planned = []
    for index, kind in enumerate(order):
        most = min(width - SPACING, steps / 8 if kind == "lose" else steps)
        step = int(FIRST + index * width + draw.random() * most)
        planned.append(PlannedFault(kind, step, fraction=draw.random(), seed=draw.getrandbits(32)))
    return tuple(planned)


def kill(pid: int) -> None:
    """Kill a worker with SIGKILL, as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)


def hang(pid: int) -> None:
    """Stop a worker with SIGSTOP: it stays alive but makes no progress."""
    os.kill(pid, signal.SIGSTOP)


def raise_error(pid: int, place: ErrorPlace) -> None:
    """Let a worker raise an exception in its next call of this place. The worker must belong to a command
    that was started for this (proof/drilled_train.py); any other worker is ended by the signal."""
    os.kill(pid, ERROR_SIGNALS[place])


@dataclass(frozen=True)
class Damage:
    """The checkpoint and the file in which a byte was flipped."""

    checkpoint: str
    file: str


def corrupt(folder: str, pid: int, draw: random.Random, save_in_flight: Callable[[], bool]) -> Damage:
    """Flip a byte of the newest checkpoint, then kill a worker.

    The worker is stopped first, because a checkpoint that lacks this worker's part cannot be committed. A
    checkpoint that has the part already can still be committed. So while a save is in progress, the worker
    continues for a moment and is stopped again.
    """
    deadline = time.monotonic() + QUIET_SECONDS
    os.kill(pid, signal.SIGSTOP)
    newest = _settled(folder)
    while save_in_flight() and time.monotonic() < deadline:
        os.kill(pid, signal.SIGCONT)
        time.sleep(SETTLE_SECONDS)
        os.kill(pid, signal.SIGSTOP)
        newest = _settled(folder)
    file = draw.choice(sorted(path for path in Path(newest).iterdir() if path.stat().st_size))
    flip(file, draw.randrange(file.stat().st_size), draw.randrange(1, 256))
    os.kill(pid, signal.SIGKILL)
    return Damage(newest, file.name)


def _settled(folder: str) -> str:
    """Return the newest checkpoint once no newer one has appeared for a while."""
    newest, since = checkpoints(folder)[-1], time.monotonic()
    while time.monotonic() - since < SETTLE_SECONDS:
        time.sleep(0.01)
        if (now := checkpoints(folder)[-1]) != newest:
            newest, since = now, time.monotonic()
    return newest


def flip(file: Path, offset: int, bits: int) -> None:
    """Change these bits of one byte of a file."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        before = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([before ^ bits]))


class FullDisk:
    """Makes the disk look full to one worker: limits the size of the files that it may write, so that its
    part of the next checkpoint is too large. Works on Linux only."""

    def __init__(self, pid: int, limit: int) -> None:
        self._pid = pid
        self._before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, self._before[1]))

    def lift(self) -> None:
        """Restore the limit that the worker had before."""
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._before)


def limits(folder: str) -> dict[int, int]:
    """Return, for each rank but the first, a limit on the size of its files that stops its part of a
    checkpoint but not its log."""
    by_rank = {}
    for path in Path(checkpoints(folder)[-1]).glob("rank-*.data"):
        rank, half = int(path.name.split("-")[1]), path.stat().st_size // 2
        if rank and half >= SMALLEST_LIMIT:
            by_rank[rank] = half
    return by_rank
