"""The store in which workers meet is there whenever a team is formed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import RunFailed
from shardwise.mesh.sockets import LOOPBACK
from shardwise.resilience import forked_process, team_store
from shardwise.resilience.fork_server import start_server
from shardwise.resilience.team_store import open_store


def _listen(pipe: Connection, address: str) -> None:
    """What holds a store does, without torch, whose import takes seconds."""
    with socket.create_server((address, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        pipe.poll(None)


def _cannot(pipe: Connection, address: str) -> None:
    raise OSError("no port is free")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[forked_process.ForkedProcess]:
    """Those that held a store, the last one perhaps still does."""
    start_server(["shardwise.resilience.worker_link"])
    started: list[forked_process.ForkedProcess] = []

    def remember(*arguments: Any) -> forked_process.ForkedProcess:
        started.append(forked_process.fork_process(*arguments))
        return started[-1]

    monkeypatch.setattr(team_store, "_hold", _listen)
    monkeypatch.setattr(team_store, "fork_process", remember)
    return started


def test_a_store_whose_process_was_killed_is_replaced(
    processes: list[forked_process.ForkedProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(LOOPBACK) as port:
        first = port()
        assert port() == first
        assert len(processes) == 1
        os.kill(processes[0].process.pid or 0, signal.SIGKILL)
        processes[0].process.join()
        second = port()
        assert port() == second
        socket.create_connection((LOOPBACK, second), timeout=5).close()
        assert (
            capsys.readouterr().err.count("the store in which workers meet was lost; another is opened") == 1
        )
    assert len(processes) == 2
    assert not any(one.process.is_alive() or Path(one.log).parent.exists() for one in processes)


def test_a_store_that_cannot_be_opened_says_why(
    processes: list[forked_process.ForkedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_store, "_hold", _cannot)
    with pytest.raises(
        RunFailed, match=r"(?s)store in which workers meet could not be opened: .*no port is free"
    ):
        open_store(LOOPBACK).__enter__()
    assert not Path(processes[0].log).parent.exists()


def test_a_machine_without_room_for_the_log_of_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(team_store.tempfile, "TemporaryDirectory", full)
    with pytest.raises(RunFailed, match=r"takes no files \(No space left on device\); make room there"):
        open_store(LOOPBACK).__enter__()


def test_a_server_that_ends_instead_of_forking_is_named_with_the_limits_that_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise EOFError

    monkeypatch.setattr(multiprocessing.get_context("forkserver").Process, "start", start)
    monkeypatch.setattr(forked_process, "limits_set", lambda: ["one", "another"])
    with pytest.raises(RunFailed, match=r"has ended\. A limit may be the cause: one; or another"):
        forked_process.fork_process(0, print, (), tmp_path)
