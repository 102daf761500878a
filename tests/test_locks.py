"""A folder is held by one process at a time: others are refused with a message, or wait their turn."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.locks import take_lock


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    with take_lock(tmp_path / ".lock", "taken"), pytest.raises(UserError, match="taken"):
        take_lock(tmp_path / ".lock", "taken")
    with take_lock(tmp_path / ".lock", "taken"):
        pass


def test_who_waits_says_so_and_goes_on_when_the_first_lets_go(tmp_path: Path) -> None:
    waiting, events = threading.Event(), list[str]()

    def second() -> None:
        with take_lock(tmp_path / ".lock", "taken", wait=waiting.set):
            events.append("second")

    thread = threading.Thread(target=second)
    with take_lock(tmp_path / ".lock", "taken"):
        thread.start()
        assert waiting.wait(30)
        events.append("first")
    thread.join(30)
    assert events == ["first", "second"]


def test_without_locks_a_run_goes_on_and_who_would_wait_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with take_lock(tmp_path / ".lock", "taken"):
        pass
    with pytest.raises(OSError, match="No locks available"):
        take_lock(tmp_path / ".lock", "taken", wait=lambda: None)
