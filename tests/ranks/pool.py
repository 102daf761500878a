"""Spawned ranks that stay alive between cases, so that a multi-rank test costs milliseconds and not an import
of torch.

A case is a module-level function `case(worker, *arguments)`. It runs on every rank of the pool at once, each
with its own `Worker`, and the pool hands back what the ranks returned, in rank order. Ranks meet in a store
that the test process owns, as workers meet at their host, each case in a generation of its own; no rank has
to find a free port. The process groups of a case end with the case.

A rank that raises fails the test with the rank's own traceback; a case that takes too long fails with the
stack of every rank. After either the ranks are replaced, because nobody knows what state they are in.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from shardwise.mesh import Worker, leave, open_rendezvous_store
from shardwise.resilience.fork_server import start_server

SECONDS = 120.0
MOST_THREADS = 16
"""Of a rank between two cases. Some cases leave groups behind, and every group of gloo has a thread that
wakes a hundred times a second; a new rank is forked in a moment."""
GRACE = 10.0
"""How long the others may take to notice that a rank has failed."""


class RankFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Pool:
    """The ranks of one world size. Started when first used."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None
        self._generation = 0

    def run(
        self, case: Callable[..., Any], *arguments: Any, seconds: float = SECONDS, stay: bool = False
    ) -> list[Any]:
        """Run a case on every rank; what each returned, in rank order. Ranks `stay` where the next case needs
        what this one left in their memories."""
        self._ranks = self._ranks or [_Rank(rank, self.world) for rank in range(self.world)]
        self._store = self._store or open_rendezvous_store()
        self._generation += 1
        task = pickle.dumps((case, arguments))
        for rank in self._ranks:
            worker = Worker(
                rank.number,
                self.world,
                rank.number,
                self.world,
                "127.0.0.1",
                self._store.port,
                "shardwise",
                self._generation,
            )
            # Test modules are found by their folder, which pytest adds to the path as it collects.
            rank.pipe.send((list(sys.path), worker, seconds, task))
        answers = self._answers(seconds)
        if len(answers) == self.world and all(isinstance(answer, _Returned) for answer in answers.values()):
            if self._ranks[0].threads() > MOST_THREADS and not stay:
                self.close()
            return [answers[rank].value for rank in range(self.world)]
        report = self._report(answers)
        self.close()
        raise RankFailed(report)

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def _answers(self, seconds: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        waiting = {rank.pipe: rank for rank in self._ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                answers[rank.number] = rank.answer()
                if not isinstance(answers[rank.number], _Returned):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _report(self, answers: dict[int, Any]) -> str:
        """The failures, the first to happen last, where a reader looks first."""
        failures = [answer for answer in answers.values() if isinstance(answer, _Raised)]
        lines = [
            f"rank {raised.rank}:\n{raised.trace}" for raised in sorted(failures, key=lambda one: -one.at)
        ]
        silent = [
            rank for rank in self._ranks if not isinstance(answers.get(rank.number), _Returned | _Raised)
        ]
        lines = [
            f"rank {rank.number} did not answer; its log:\n{rank.log.read_text()[-6000:]}" for rank in silent
        ] + lines
        return "\n".join(lines)


class _Returned:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised:
    def __init__(self, rank: int, error: BaseException) -> None:
        self.rank, self.at = rank, time.time()
        self.trace = "".join(traceback.format_exception(error))


class _Rank:
    """One spawned process, seen from the test."""

    def __init__(self, number: int, world: int) -> None:
        self.number = number
        descriptor, name = tempfile.mkstemp(prefix=f"rank-{number}-of-{world}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        start_server(["shardwise.train.steps"])  # torch is imported once, and every rank forks from there
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        try:
            return pickle.loads(self.pipe.recv())
        except EOFError:
            return None

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)


def _serve(pipe: Connection, log: str) -> None:
    """What a rank does all day."""
    stream = open(log, "a", buffering=1)  # noqa: SIM115  (the rank writes to it to its end)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection after each case then looks at what the case made, not at all of torch
    while True:
        try:
            path, worker, seconds, task = pipe.recv()
        except (EOFError, OSError):
            return  # the tests are over
        stream.truncate(0)
        sys.path[:] = path
        faulthandler.dump_traceback_later(seconds * 0.95, file=stream)
        answer = _answer(worker, task)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


class _Packer(pickle.Pickler):
    """torch saves each tensor in a file of its own, which takes a third of a millisecond."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor:
            return NotImplemented
        numbers = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _unpacked, (numbers, value.dtype, tuple(value.shape))


def _unpacked(numbers: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return (
        torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)
        if numbers
        else torch.empty(shape, dtype=dtype)
    )


def packed(value: Any) -> bytes:
    """What `pickle.loads` makes this value of, in another process."""
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


def _wait_for_peers(world: int) -> None:
    """Wait until every rank has returned, or one has failed. A rank whose last call created a group could
    otherwise close its connections while a slower rank still makes its own."""
    from torch import distributed

    if not distributed.is_initialized():
        return
    store = distributed.distributed_c10d._get_default_store()
    store.add("returned", 1)
    deadline = time.monotonic() + GRACE
    while store.add("returned", 0) < world and not store.add("raised", 0) and time.monotonic() < deadline:
        time.sleep(0.001)


def _tell_peers() -> None:
    """Let peers that have returned wait no longer, because this rank has failed."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.distributed_c10d._get_default_store().add("raised", 1)


def _answer(worker: Worker, task: bytes) -> bytes:
    try:
        case, arguments = pickle.loads(task)
        answer = packed(_Returned(case(worker, *arguments)))
        _wait_for_peers(worker.world)
        return answer
    except BaseException as error:  # whatever it is, it belongs to the test
        _tell_peers()
        return pickle.dumps(_Raised(worker.rank, error))
    finally:
        leave()  # peers that wait for this rank then fail at once
        gc.collect()
