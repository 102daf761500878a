"""Faults for a fire drill: which, when, and how they are done to a run from outside.

Nothing in the run takes part: workers are stopped and killed by their process ids, bytes are flipped on the
disk, a process is forbidden to write large files. What survives this survives a real machine, as far as one
machine can play several.

    kill     SIGKILL to a worker, as the kernel does when memory runs out: another must take its place
    hang     SIGSTOP to a worker, which is then alive but does no step: it must be noticed and replaced
    corrupt  a byte of the newest checkpoint is flipped, then a worker is killed: the run must resume from the
             checkpoint before it
    full     a worker cannot write large files (EFBIG) until a save has failed: the run must not restart, and
             the next save must be complete
    term     SIGTERM to every process, as a scheduler does: the run must save and exit with status 75; when it
             is started again, no step is lost
    lose     a host with one worker disappears at once, and comes back later: the others must go on without
             it, and then take it back

Times are drawn from a seed: a step in each of as many stretches of the run as there are faults, and a share
of a step after it, so that faults also fall into saves. Where in a step that lands is up to the clock; steps,
ranks, files and bytes are not.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardwise.checkpoint import checkpoints
from shardwise.errors import UserError

Kind = Literal["kill", "hang", "corrupt", "full", "term", "lose"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SPACING = 3
"""Fewest steps from one fault to the next."""
FIRST = 2
"""No fault before this step is done."""
SETTLE_SECONDS = 0.2
"""How long the newest checkpoint must have been the newest, while a worker is stopped, to stay so."""
QUIET_SECONDS = 10.0
"""How long to look for a moment in which no save is in flight."""
SMALLEST_LIMIT = 1 << 14
"""Bytes: below this, a limit on files would hit a worker's log as well."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault to come: after which step is done, how much of a step later, and the seed of what else is to be
    drawn."""

    kind: Kind
    step: int
    fraction: float
    seed: int


def schedule(
    kinds: Sequence[Kind], count: int, seed: int, steps: int, every: int, room: int = 2
) -> tuple[PlannedFault, ...]:
    """The faults of a drill. Kinds take turns, shuffled, so that each occurs if there are as many faults as
    kinds.

    `every`: steps between saves; `room`: steps that must be left after the last fault. To lose a host comes
    first, and early: many steps are done until it is back.
    """
    draw = random.Random(seed)
    order: list[Kind] = []
    while len(order) < count:
        order += draw.sample(kinds, len(kinds))
    order = sorted(order[:count], key=lambda kind: kind != "lose")
    last = steps - max(room, 2 * every + 1 if "full" in order else 0)
    width = (last - FIRST + 1) / count
    if width < SPACING:
        most = max(0, (last - FIRST + 1) // SPACING)
        raise UserError(
            f"--count {count}: {steps} steps have room for {most} such faults, {SPACING} apart; lower it, or "
            f"raise train.steps"
        )
    if "corrupt" in order and FIRST + (len(order) - order[::-1].index("corrupt")) * width <= 2 * every:
        raise UserError(
            f"checkpoint.every = {every}: `corrupt` needs two checkpoints, and comes too early in {steps} "
            f"steps; save more often"
        )
    return tuple(
        PlannedFault(
            kind,
            step=int(
                FIRST
                + index * width
                + draw.random() * min(width - SPACING, steps / 8 if kind == "lose" else steps)
            ),
            fraction=draw.random(),
            seed=draw.getrandbits(32),
        )
        for index, kind in enumerate(order)
    )


def kill(pid: int) -> None:
    """End a worker as the kernel does."""
    os.kill(pid, signal.SIGKILL)


def hang(pid: int) -> None:
    """Leave a worker alive and without progress."""
    os.kill(pid, signal.SIGSTOP)


@dataclass(frozen=True)
class Damage:
    """A byte that was flipped: in which checkpoint, in which file of it."""

    checkpoint: str
    file: str


def corrupt(folder: str, pid: int, draw: random.Random, save_in_flight: Callable[[], bool]) -> Damage:
    """Flip a byte of the newest checkpoint, then end a worker.

    The worker is stopped first: a checkpoint that lacks its part cannot be committed. One that has its part
    already still can, so while a save is in flight the worker goes on for a moment and is stopped again.
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
    """Return the newest checkpoint once no newer one has come for a while."""
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
    """One worker's disk is full: its part of the next checkpoint is too large for what it may write. Linux
    only."""

    def __init__(self, pid: int, limit: int) -> None:
        import resource

        self._pid = pid
        self._before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, self._before[1]))

    def lift(self) -> None:
        """Let the worker write files of any size again."""
        import resource

        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._before)


def limits(folder: str) -> dict[int, int]:
    """For each rank but the first: a limit on its files that stops its part of a checkpoint, and not its
    log."""
    by_rank = {}
    for path in Path(checkpoints(folder)[-1]).glob("rank-*.data"):
        rank, half = int(path.name.split("-")[1]), path.stat().st_size // 2
        if rank and half >= SMALLEST_LIMIT:
            by_rank[rank] = half
    return by_rank
