"""Starts the workers of this machine, and runs in each of them.

`launch` runs in the command if shardwise starts the workers itself: the command becomes a host of the run
(resilience/host.py), and leads the run unless another node does. `serve` runs in each worker: it trains in
one team after another and reports to its host. When the run cannot continue, the first cause is printed last.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tomllib
import traceback
import uuid
from contextlib import closing
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TextIO, cast

from shardwise.checkpoint import checkpoints, step_of
from shardwise.config import Config, to_toml
from shardwise.drivers.registry import driver_of
from shardwise.files import regular_file_opener
from shardwise.mesh import Node, Worker, worker_environment
from shardwise.mesh.sockets import LOOPBACK, address_for_other_machines
from shardwise.observe import EventsFile, unblocked_output
from shardwise.resilience.first_node_file import FirstNodeFile
from shardwise.resilience.fork_server import start_server
from shardwise.resilience.host import Host
from shardwise.resilience.host_description import HostDescription
from shardwise.resilience.leader_file import LeaderFile
from shardwise.resilience.leadership import Hold, Leadership
from shardwise.resilience.team import Bounds, Leader
from shardwise.resilience.team_store import FindPort, open_store
from shardwise.search.planner import Planner
from shardwise.train.resume import checkpoint_folder
from shardwise.version import __version__

log = logging.getLogger("shardwise")

LOG_BYTES = 4 << 20
"""Size at which the log of a rank is copied to NAME.1 and emptied."""
LONGEST_SETTING = 120
"""Number of characters from which a setting is shortened before hosts compare it."""
WORKERS_IMPORT = ("shardwise.train.run",)
"""Modules that the server imports before workers are forked from it."""


def launch(
    config: Config,
    workers: int,
    bounds: Bounds,
    node: Node | None,
    planner: Planner,
    hold: Hold,
    first_node: FirstNodeFile | None = None,
    data: str = "",
) -> int:
    """Take part in the run with this many local workers. Return the exit status, or raise the first cause.

    `hold` locks the folders of the run against other runs, on the host that leads it. With several nodes,
    `first_node` is the file by which the first node announces itself, and `data` describes the data.

    The server that imports torch is started here and not before, so that a refused job ends at once.
    """
    first = (
        (address_for_other_machines(node.address), node.port) if node is not None and node.nodes > 1 else None
    )
    start_server(WORKERS_IMPORT)
    name = f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"

    def make_leader(port: FindPort) -> Leader:
        return Leader(
            bounds, lambda devices: planner.on(devices, bounds.minimum), config.recovery.step_attempts, port
        )

    if node is None or first is None:
        with hold(), open_store(LOOPBACK) as port:
            return _host(name, config, workers, make_leader(port), None)
    leader_file = LeaderFile(Path(config.run.folder), name, node.run_id, node.secret, first)
    description = HostDescription(name, __version__, version("torch"), workers, _settings(config), data)
    first_node = first_node or FirstNodeFile(Path(config.run.folder), node.run_id)
    with closing(Leadership(description, first, leader_file, first_node, hold, make_leader)) as leadership:
        return _host(name, config, workers, leadership.begin() if node.node_rank == 0 else None, leadership)


def _host(
    name: str, config: Config, workers: int, leader: Leader | None, leadership: Leadership | None
) -> int:
    """Keep this machine's workers until the run ends."""
    events = EventsFile(Path(config.run.folder) / "events.jsonl", _warn)
    host = Host(
        name=name,
        slots=workers,
        start=partial(serve, config, worker_environment(workers)),
        recovery=config.recovery,
        logs=Path(config.run.folder) / "logs",
        leader=leader,
        record=events.write,
        newest_saved=partial(newest_saved, config),
        leadership=leadership,
        loose=driver_of(config).has_loose_workers,
    )
    with closing(events), unblocked_output():
        return host.run()


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def newest_saved(config: Config) -> int | None:
    """Return the step of the newest whole checkpoint of a run; None: there is none."""
    return max(map(step_of, checkpoints(checkpoint_folder(config))), default=None)


def _settings(config: Config) -> dict[str, str]:
    """Return every setting of the job as text, by name, for hosts to compare. The end of a long setting is
    replaced by a checksum."""
    tables = tomllib.loads(to_toml(config, as_asked=True))
    return {
        f"{name}.{key}": _short(json.dumps(value))
        for name, table in tables.items()
        for key, value in table.items()
    }


def _short(text: str) -> str:
    checksum = hashlib.sha256(text.encode()).hexdigest()[:12]
    return text if len(text) <= LONGEST_SETTING else f"{text[: LONGEST_SETTING // 2]}… (checksum {checksum})"


def serve(config: Config, environment: dict[str, str], slot: int, pipe: Connection) -> NoReturn:
    """Run a worker of a host. This ends the process immediately in every case, because a normal exit might
    wait forever for other ranks."""
    from shardwise._torch import lock_progress_bars_among_threads
    from shardwise.resilience.worker_link import HostLink
    from shardwise.train.run import last_collective, run

    os.environ.update(environment)
    log.addHandler(logging.NullHandler())  # until it is known which rank's log this is
    output = Output(Path(config.run.folder) / "logs")
    lock_progress_bars_among_threads()
    link = HostLink(pipe, last_collective, output.belongs_to)
    status = 1
    try:
        with unblocked_output():
            status = run(config, link)
        link.done(status)
    except BaseException as error:
        log.error("%s", "".join(traceback.format_exception(error)))
        link.failed(error)
    finally:
        os._exit(status)


class Output:
    """The destination of a worker's output: each rank has a log, and ranks other than 0 print to it too."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._terminal = (os.dup(1), os.dup(2))
        self._handler: BoundedLog | None = None

    def belongs_to(self, worker: Worker) -> None:
        """Direct the output of this process to the log of this rank."""
        self._handler = log_to(self._logs / f"rank-{worker.rank}.log", self._handler)
        target = self._terminal if worker.rank == 0 else (self._handler.file.fileno(),) * 2
        os.dup2(target[0], 1)
        os.dup2(target[1], 2)
        faulthandler.register(signal.SIGQUIT, file=self._handler.file, all_threads=True)


class BoundedLog(logging.FileHandler):
    """A log of at most two files of `LOG_BYTES`: the older half becomes NAME.1.

    The file is emptied and not replaced, because the worker's output and faulthandler's stacks are written to
    it too.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and empty the file when it is too large."""
        super().emit(record)
        with contextlib.suppress(OSError):
            if os.fstat(self.file.fileno()).st_size > LOG_BYTES:
                with contextlib.suppress(OSError):
                    shutil.copyfile(self.baseFilename, f"{self.baseFilename}.1")
                self.file.truncate(0)

    def _open(self) -> TextIOWrapper:
        opener = None if self.baseFilename == os.devnull else regular_file_opener
        return cast(TextIOWrapper, open(self.baseFilename, self.mode, encoding=self.encoding, opener=opener))

    @property
    def file(self) -> TextIO:
        """The file to which the log is written."""
        assert self.stream is not None, "the constructor opens it"
        return self.stream


def log_to(path: Path, instead_of: logging.Handler | None = None) -> BoundedLog:
    """Write this worker's log to a file. If it cannot be opened, print a warning and write no log."""
    logging.raiseExceptions = False  # a full disk is reported once, not for every line of the log
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = BoundedLog(path)
    except OSError as error:
        print(f"warning: no log is kept: {path} cannot be written ({error.strerror})", file=sys.stderr)
        handler = BoundedLog(os.devnull)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if instead_of is not None:
        log.removeHandler(instead_of)
        instead_of.close()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler
