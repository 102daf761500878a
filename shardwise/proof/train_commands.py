"""Start the `shardwise train` commands of a drill as real processes, and end all of them afterwards.

The commands are started as a user or a scheduler would start them. Each command acts as one host. Several
commands on this machine find each other like the nodes of a cluster, through the environment variables that
Kubernetes operators set for torchrun. Each command runs in a session of its own, so that Ctrl-C reaches only
the drill, which then ends the commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from shardwise.resilience.forked_process import free_port

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "PET_NNODES", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
"""Environment variables by which a command recognises that another launcher started it (mesh/environment.py).
The drill removes them from the environment of its commands."""
DRILLED = "shardwise.proof.drilled_train"
"""Module that is `shardwise train` with workers that can raise the exceptions of a drill."""
LOG_TAIL = 4000
"""Number of characters from the end of the log that an error message shows."""
GONE_SECONDS = 10.0
"""Seconds to wait for killed processes to end before they are killed again."""


class TrainCommands:
    """The `shardwise train` commands of one run, one for each host, and the processes they started."""

    def __init__(self, job: Path, folder: Path, raises_errors: bool = False) -> None:
        """Prepare the commands of a job. With `raises_errors`, workers raise exceptions when the drill sends
        them a signal (proof/drilled_train.py)."""
        self.job, self.folder = job, folder
        self._module = DRILLED if raises_errors else "shardwise"
        self.log = folder.with_suffix(".log")
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._starts: list[list[str]] = []
        self._ended: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TrainCommands:
        return self

    def __exit__(self, *_: object) -> None:
        end([*self._ended, *self._hosts])

    def start(self, workers: Sequence[int]) -> None:
        """Start one command with this many workers, or one command for each of several hosts."""
        self._ended += self._hosts
        rendezvous = [
            f"PET_RDZV_ENDPOINT=127.0.0.1:{free_port()}",
            f"PET_RDZV_ID=drill-{secrets.token_hex(4)}",
        ]
        self._starts = [self._command(node, workers, rendezvous) for node in range(len(workers))]
        self._hosts = [self._run(command) for command in self._starts]

    def start_again(self) -> None:
        """Start the command of the lost host again."""
        self._hosts.append(self._run(self._starts[-1]))

    def _command(self, node: int, workers: Sequence[int], rendezvous: Sequence[str]) -> list[str]:
        environment, bounds = [word for name in LAUNCHERS for word in ("-u", name)], []
        if len(workers) > 1:
            environment += [f"PET_NNODES={len(workers)}", f"PET_NODE_RANK={node}", *rendezvous]
            bounds = ["--min-workers", str(workers[0]), "--max-workers", str(sum(workers))]
        train = [sys.executable, "-m", self._module, "train", str(self.job)]
        return ["env", *environment, *train, "--workers", str(workers[node]), *bounds]

    def _run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def running(self) -> bool:
        """Return whether any command still runs."""
        return any(host.poll() is None for host in self._hosts)

    def statuses(self) -> list[int | None]:
        """Return the exit status of each command; None means that it still runs."""
        return [host.poll() for host in self._hosts]

    def terminate(self) -> None:
        """Send SIGTERM to every process of every command, as a scheduler does."""
        for host in self._hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGTERM)

    def lose_last(self) -> list[int]:
        """Kill the last host with all its processes, and return the ranks that ran on it."""
        host = self._hosts.pop()
        ranks = sorted(rank for rank, pid in self.workers({host.pid}).items())
        end([host])
        return ranks

    def workers(self, supervisors: set[int] | None = None) -> dict[int, int]:
        """Return the process ids of the workers that run now, by rank."""
        wanted = supervisors or {host.pid for host in self._hosts}
        pids: dict[int, int] = {}
        for path in (self.folder / "logs").glob("workers-*.json"):
            team = json.loads(path.read_text())
            if team["supervisor"] in wanted:
                ranks = {worker["rank"]: worker["pid"] for worker in team["workers"] if not worker["loose"]}
                pids |= {rank: pid for rank, pid in ranks.items() if psutil.pid_exists(pid)}
        return pids

    def log_tail(self) -> str:
        """Return the end of what the commands printed."""
        return self.log.read_text(errors="replace")[-LOG_TAIL:].strip() if self.log.exists() else ""


def end(hosts: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill commands with all processes that they started, and wait until these are gone.

    Supervisors are killed first, because they would replace killed workers.
    """
    doomed: list[psutil.Process] = []
    for host in hosts:
        if host.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                doomed += [psutil.Process(host.pid), *psutil.Process(host.pid).children(recursive=True)]
    _kill(doomed)
    for host in hosts:
        host.wait()
    _, left = psutil.wait_procs([*doomed, *_in_sessions({host.pid for host in hosts})], timeout=GONE_SECONDS)
    _kill(left)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _in_sessions(leaders: set[int]) -> Iterator[psutil.Process]:
    """Yield the processes that are left in the sessions of these commands.

    The server that workers are forked from ends a moment after its command.
    """
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) in leaders:
                yield psutil.Process(pid)
