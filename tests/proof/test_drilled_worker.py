"""Exceptions that a drill raises in a worker: in the place that was asked for, in the main thread, once, and
only in commands that were started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.save import HostCopies
from shardwise.proof.drill_faults import ERROR_PLACES, ERROR_SIGNALS, ErrorPlace, raise_error
from shardwise.proof.drilled_train import PRELOAD
from shardwise.proof.drilled_worker import DrillError, RaiseAt
from shardwise.proof.train_commands import DRILLED, TrainCommands
from shardwise.resilience import fork_server


def sum_over_ranks() -> None:
    dist.all_reduce(torch.ones(1))


def create_group() -> None:
    dist.new_group()


def copy_for_save() -> None:
    HostCopies().take({})


CALLS: list[tuple[ErrorPlace, Callable[[], Any], str]] = [
    ("collective", sum_over_ranks, "all_reduce"),
    ("group", create_group, "new_group"),
    ("save", copy_for_save, "take"),
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    sys.setprofile(None)


def call(function: Callable[[], Any]) -> str:
    """Call a function; return what the drill's exception says, or nothing if it raised another or none."""
    try:
        function()
    except DrillError as error:
        return str(error)
    except (ValueError, RuntimeError):  # there is no process group here
        return ""
    return ""


@pytest.mark.parametrize(("place", "function", "name"), CALLS, ids=[place for place, _, _ in CALLS])
def test_a_signal_lets_the_next_call_in_a_place_raise_once(
    place: ErrorPlace, function: Callable[[], Any], name: str
) -> None:
    raise_error(os.getpid(), place)
    others = [other for _, other, _ in CALLS if other is not function]
    assert [call(other) for other in others] == ["", ""], "these are other places"
    assert call(function) == f"raised by the drill in {name} ({place})"
    assert sys.getprofile() is None
    assert call(function) == "", "it is raised once"


def test_a_communicator_is_created_by_the_first_collective_after_workers_have_met() -> None:
    sys.setprofile(RaiseAt("communicator"))
    assert call(sum_over_ranks) == "", "it belongs to the team before"
    with pytest.raises(RuntimeError, match="No rendezvous handler"):
        dist.init_process_group("gloo", rank=0, world_size=1, init_method="nowhere://")
    assert call(sum_over_ranks) == "raised by the drill in all_reduce (communicator)"


def test_every_place_has_a_signal_that_asks_no_run_to_stop() -> None:
    from shardwise.resilience.stopping import STOP_SIGNALS

    assert ERROR_SIGNALS.keys() == set(ERROR_PLACES)
    assert len({*ERROR_SIGNALS.values()}) == len(ERROR_PLACES)
    assert not {*ERROR_SIGNALS.values()} & {*STOP_SIGNALS, signal.SIGRTMIN}


@pytest.mark.parametrize("raises_errors", [False, True])
def test_a_run_is_started_as_a_user_does_unless_it_is_to_raise_exceptions(
    tmp_path: Path, raises_errors: bool
) -> None:
    commands = TrainCommands(tmp_path / "job.toml", tmp_path / "run", raises_errors)
    words = commands._command(0, [2], [])
    assert words[words.index("-m") + 1] == (DRILLED if raises_errors else "shardwise")
    assert words[words.index("-m") + 2] == "train"


@pytest.mark.parametrize("raises_errors", [pytest.param(False, marks=pytest.mark.full), True])
def test_workers_of_ordinary_commands_have_no_handler(raises_errors: bool) -> None:
    """Of the modules that the fork server imports for `shardwise train`, only the drill's sets a handler."""
    from shardwise.train.launch import WORKERS_IMPORT

    modules = ["shardwise.resilience.preload", *WORKERS_IMPORT, *([PRELOAD] if raises_errors else [])]
    script = (
        f"import signal, {', '.join(modules)}\n"
        f"print([signal.getsignal(n) is not signal.SIG_DFL for n in {[*ERROR_SIGNALS.values()]}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([raises_errors] * len(ERROR_SIGNALS))


def test_a_module_that_is_preloaded_too_comes_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[list[str]] = []
    context = fork_server.multiprocessing.get_context("forkserver")
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda _, modules: named.append(modules))
    monkeypatch.setattr(fork_server, "ensure_server", lambda: None)
    monkeypatch.setattr(fork_server, "_also", [])
    fork_server.start_server(["a"])
    fork_server.also_preload("b")
    fork_server.start_server(["a"])
    assert named == [["shardwise.resilience.preload", "a"], ["shardwise.resilience.preload", "a", "b"]]
