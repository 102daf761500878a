"""Starting local workers with torch's elastic launcher, and telling what became of them.

Each worker runs the very command the user typed, as torchrun would start it, so there is one way in. Workers sit in sessions
of their own; Ctrl-C reaches only this process, which passes it on and waits until they have saved. When a worker
fails, the rest are ended and the first real cause is the last thing printed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Node, cores, worker_environment

INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM: the state is saved, and the same command goes on from it."""

SHUTDOWN_SECONDS = 300
"""How long workers may take to save after Ctrl-C before they are killed."""


@dataclass(frozen=True)
class Failure:
    """Why one worker ended, in its own words."""

    rank: int
    at: float
    status: int
    message: str
    trace: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether this is only the noise of another worker's death."""
        return any(word in self.message for word in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def launch(arguments: Sequence[str], workers: int, node: Node | None, logs: Path) -> int:
    """Run `shardwise ARGUMENTS` in this many local workers; returns their exit status, or raises the first cause."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("", ".agent.server.api", ".multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)  # what it would say is said below
    for old in logs.glob("rank-*.failure.json"):
        old.unlink()
    os.environ.update(worker_environment(max(1, cores() // workers), SHUTDOWN_SECONDS))
    with tempfile.TemporaryDirectory() as scratch:
        config = LaunchConfig(
            min_nodes=node.nodes if node else 1,
            max_nodes=node.nodes if node else 1,
            nproc_per_node=workers,
            run_id=node.run_id if node else uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{node.address}:{node.port}" if node else "localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shardwise", *arguments)
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _explain(statuses, _failures(logs), logs)
        except SignalException as error:
            return INTERRUPTED if error.sigval in (signal.SIGINT, signal.SIGTERM) else 1
    return 0


def _explain(statuses: dict[int, int], told: list[Failure], logs: Path) -> int:
    """Raise the first real cause: what a worker said of itself, else the signal that ended one."""
    if set(statuses.values()) == {INTERRUPTED}:
        return INTERRUPTED
    real = [failure for failure in told if not failure.is_echo]
    killed = {rank: -status for rank, status in statuses.items() if status < 0 and -status != signal.SIGTERM}
    if real:
        first = min(real, key=lambda failure: failure.at)
        if first.trace:
            raise RunFailed(
                f"{first.trace.rstrip()}\nworker {first.rank} failed: {first.message}\nits log: {_log(logs, first.rank)}"
            )
        raise UserError(first.message) if first.status == 2 else RunFailed(first.message)
    if killed:
        rank, number = next(iter(killed.items()))
        hint = " The machine may be out of memory." if number == signal.SIGKILL else ""
        raise RunFailed(
            f"worker {rank} was ended by {signal.Signals(number).name}.{hint} Its log: {_log(logs, rank)}. "
            "Run the same command again to resume from the last checkpoint."
        )
    rank, status = next(iter(statuses.items()))
    raise RunFailed(f"worker {rank} ended with status {status}. Its log: {_log(logs, rank)}")


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _failures(logs: Path) -> list[Failure]:
    return [Failure(**json.loads(path.read_text())) for path in sorted(logs.glob("rank-*.failure.json"))]


def tell_failure(logs: Path, rank: int, error: BaseException) -> None:
    """Leave word for the launcher of why this worker ends."""
    ours = isinstance(error, UserError)
    failure = Failure(
        rank=rank,
        at=time.time(),
        status=error.status if isinstance(error, UserError) else 1,
        message=str(error) if ours else f"{type(error).__name__}: {error}",
        trace="" if ours else "".join(traceback.format_exception(error)),
    )
    logging.getLogger("shardwise").error("%s", failure.trace or failure.message)
    path = logs / f"rank-{rank}.failure.json"
    path.with_suffix(".part").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".part").rename(path)


def log_to(logs: Path, rank: int, redirect: bool) -> None:
    """Keep this worker's log in its own file; with `redirect`, send all that it prints there too."""
    logs.mkdir(parents=True, exist_ok=True)
    path = _log(logs, rank)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if redirect:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
