"""The server that workers are forked from."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.resilience.forked_process import free_port

PROGRAM = """
import sys
from pathlib import Path
from test_fork_server import garbage_collection
from shardwise.resilience.forked_process import end_processes, fork_process
from shardwise.resilience.fork_server import start_server

start_server(["test_fork_server"])
worker = fork_process(0, garbage_collection, (), Path(sys.argv[1]))
"""


def garbage_collection(pipe: Connection) -> None:
    pipe.send((gc.isenabled(), gc.get_freeze_count() > 1000))


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", PROGRAM + program, str(folder)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, timeout=60
    )


def test_a_worker_collects_garbage_but_not_among_what_its_server_imported(tmp_path: Path) -> None:
    done = run("print(worker.receive()); end_processes([worker])", tmp_path)
    assert done.stdout == "(True, True)\n", done.stderr


def test_a_worker_whose_starter_is_gone_with_its_folder_ends_without_a_word(tmp_path: Path) -> None:
    done = run("worker.process.join(); print(worker.process.exitcode)", tmp_path / "gone")
    assert (done.stdout, done.stderr) == ("0\n", "")


DIES_WHEN_ASKED = """
import multiprocessing, os, signal, threading
from shardwise.resilience.fork_server import server_pid, start_process
worker.receive()

def start():
    return start_process(multiprocessing.get_context("forkserver").Process(target=int), 20, lambda: False)

os.kill(server_pid(), signal.SIGSTOP)
threading.Timer(0.5, os.kill, (server_pid(), signal.SIGKILL)).start()
print(start(), flush=True)
print(start(), flush=True)
"""


def test_a_server_that_dies_as_it_is_asked_for_a_process_is_started_again_for_the_next(
    tmp_path: Path,
) -> None:
    done = run(DIES_WHEN_ASKED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_a_free_port_is_none_that_the_system_gives_to_a_connection() -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first_of_connections for _ in range(20))
    # Processes that share a seed choose different ports.
    chosen = []
    for _ in range(20):
        random.seed(0)
        chosen.append(free_port())
    assert len(set(chosen)) > 10


def test_a_machine_on_which_no_port_can_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UserError, match="100 ports between 10000 and 32767"):
        free_port()
