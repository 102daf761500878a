"""A terminal that is not read, a pipe that is closed, a disk that is full: training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from shardwise.observe import TrainingProgress, output, unblocked_output
from shardwise.observe.output import UnblockedStream


def ends_soon(action: Callable[[], None]) -> bool:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_what_is_left_out_is_said() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader) as read_end:
        stream = UnblockedStream(pipe)

        def speak() -> None:
            for number in range(300_000):
                print(f"line {number}", file=stream, flush=True)
            stream.finish(0.1)

        assert ends_soon(speak)
        lines = [read_end.readline() for _ in range(1000)]
        assert lines == [f"line {number}\n" for number in range(1000)]
        assert any("characters were not shown" in line for line in iter(read_end.readline, ""))


def test_all_that_was_said_is_there_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with unblocked_output():
        print("a result")
        Console(stderr=True).print("a message")
    assert (out.getvalue(), err.getvalue()) == ("a result\n", "a message\n")
    assert sys.stderr is err


def test_progress_is_drawn_on_a_terminal_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LAST_SECONDS", 0.1)
    leader, follower = os.openpty()
    record = {
        "loss": 1.0,
        "seconds": 0.1,
        "tokens_per_second": 1.0,
        "sequences_per_second": 1.0,
        "mfu": None,
        "memory_bytes": 1,
    }

    def train() -> None:
        with TrainingProgress(Console(file=UnblockedStream(terminal), force_terminal=True), 1000) as progress:
            for step in range(1, 1001):
                progress.update({**record, "step": step})
                progress.message("saved " + "x" * 100)

    terminal = os.fdopen(follower, "w")
    assert ends_soon(train), "nobody reads from the other side"
    os.close(leader)
    with contextlib.suppress(OSError):
        terminal.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in (writer, os.open("/dev/full", os.O_WRONLY)):
        stream = os.fdopen(descriptor, "w")
        monkeypatch.setattr(sys, "stderr", stream)
        with unblocked_output():
            for _ in range(10):
                print("anybody?", file=sys.stderr)
        with contextlib.suppress(OSError):
            stream.close()
