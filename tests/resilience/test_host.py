"""One host and its processes, with workers that pretend to train."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pretend import STEPS, plan_for, work

from shardwise.config import Recovery
from shardwise.errors import RunFailed, Unreadable, UserError
from shardwise.mesh import Worker
from shardwise.resilience import host as host_module
from shardwise.resilience import worker_process
from shardwise.resilience.channel import LINE_BYTES, Channel
from shardwise.resilience.fork_server import server_pid, start_server
from shardwise.resilience.host import Host
from shardwise.resilience.stopping import INTERRUPTED, RESUME_ME, STOP_SIGNALS
from shardwise.resilience.team import Bounds, Fault, Leader, Member, Orders, Refusal, Report, Team
from shardwise.resilience.worker_link import HostLink
from shardwise.resilience.worker_messages import (
    Done,
    Failed,
    JoinTeam,
    Progress,
    Signalled,
    TeamBroke,
    Waiting,
)
from shardwise.resilience.worker_process import WorkerProcess, fault_of_dead_worker

# A host leaves signals ignored, because its process is about to end.
pytestmark = pytest.mark.usefixtures("signals_as_before")
Events = list[tuple[str, dict[str, Any]]]


def a_host(folder: Path, deeds: dict[str, int], workers: int = 2) -> tuple[Host, Events]:
    start_server(["shardwise.resilience.worker_link"])
    events: Events = []
    host = Host(
        name="here",
        slots=workers,
        start=partial(work, str(folder), deeds),
        recovery=Recovery(hang_seconds=1.0),
        logs=folder,
        leader=Leader(Bounds(workers, workers), plan_for, 3, lambda: 0),
        record=lambda event, **facts: events.append((event, facts)),
        newest_saved=lambda: int(saved.read_text()) if (saved := folder / "saved").exists() else None,
    )
    return host, events


def steps_of(folder: Path, slot: int) -> list[int]:
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [int(step) for who, step in lines if int(who) == slot]


def test_workers_train_to_the_end(tmp_path: Path) -> None:
    host, events = a_host(tmp_path, {})
    assert host.run() == 0
    assert events == []
    assert steps_of(tmp_path, 0) == steps_of(tmp_path, 1) == list(range(1, STEPS + 1))
    known = json.loads((tmp_path / "workers-here.json").read_text())
    assert [(one["rank"], one["slot"]) for one in known["workers"]] == [(0, 0), (1, 1)]
    assert known["supervisor"] == os.getpid()


def test_a_worker_that_dies_is_replaced_and_the_other_keeps_its_process(tmp_path: Path) -> None:
    (tmp_path / "gone-5").touch()
    host, events = a_host(tmp_path, {"die": 5})
    assert host.run() == 0
    assert [(event, facts["kind"], facts["rank"], facts["step"]) for event, facts in events] == [
        ("fault", "died", 1, 5)
    ]
    assert "ended with status 9" in events[0][1]["cause"]
    assert steps_of(tmp_path, 1) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("deed", ["hang", "stop answering"])
def test_a_hang_is_noticed_by_the_steps_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    monkeypatch.setattr(host_module, "PARTING_SECONDS", 0.2)
    (tmp_path / "wait-5").touch()
    host, events = a_host(tmp_path, {deed: 5})
    assert host.run() == 0
    assert [(event, facts["kind"]) for event, facts in events] == [("fault", "hung")]
    told = (tmp_path / "hang-1.txt").read_text()
    if deed == "hang":
        assert "last collective: a pretended sum" in told
        assert "_misbehave" in told, "the stack shows where it hangs"
    else:
        assert "rank 1 does not answer" in events[0][1]["cause"]
        assert events[0][1]["rank"] == 1
    assert steps_of(tmp_path, 1)[-1] == STEPS


def test_a_step_that_always_fails_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "PARTING_SECONDS", 0.2)
    host, events = a_host(tmp_path, {"always fail": 4})
    with pytest.raises(
        RunFailed, match=r"(?s)step 4 failed 3 times in a row.*\(rank 1\): ValueError: bad row"
    ):
        host.run()
    assert [facts["step"] for _, facts in events] == [4, 4, 4]


def test_a_failure_that_cannot_be_mended_is_not_tried_again(tmp_path: Path) -> None:
    host, events = a_host(tmp_path, {"hopeless": 4})
    with pytest.raises(RunFailed, match=r"^a bad loss$"):
        host.run()
    assert len(events) == 1


def test_a_loose_worker_that_never_gets_to_work_rests_until_none_of_them_does(tmp_path: Path) -> None:
    host, events = a_host(tmp_path, {}, workers=3)
    host.loose, host._members = True, {0: 0}

    def lose(slot: int, step: int = 0) -> None:
        host._note_lost(cast(WorkerProcess, SimpleNamespace(slot=slot, step=step)), killed)

    killed = Fault("died", 1, 0, "worker 1 was ended by SIGKILL", 0.0, 1)
    for _ in range(host.recovery.step_attempts):
        lose(1)
    assert host._usable_slots() == [0, 2]
    lose(2, step=7)
    lose(2)
    lose(2)
    assert [event for event, _ in events].count("slot_rests") == 1
    with pytest.raises(
        RunFailed, match="every worker on here failed 3 times in a row: worker 1 was ended by SIGKILL"
    ):
        lose(2)


def after_three_steps(folder: Path, do: Callable[[], None]) -> None:
    def wait_and_do() -> None:
        while not (folder / "log").exists() or len(steps_of(folder, 0)) < 3:
            time.sleep(0.01)
        do()

    threading.Thread(target=wait_and_do, daemon=True).start()


def worker_of(folder: Path, rank: int) -> int:
    known = json.loads((folder / "workers-here.json").read_text())
    return next(int(worker["pid"]) for worker in known["workers"] if worker["rank"] == rank)


USUAL = [
    ("host", signal.SIGINT),
    ("host", signal.SIGTERM),
    ("worker", signal.SIGUSR1),
    ("server", signal.SIGHUP),
]
"""Of all signals to all processes, what is tried each time."""


@pytest.mark.parametrize(
    ("to", "number"),
    [
        pytest.param(to, number, marks=[] if (to, number) in USUAL else pytest.mark.full)
        for to, number in product(("host", "worker", "server"), STOP_SIGNALS)
    ],
)
def test_a_signal_to_any_process_stops_all_workers_after_a_step(tmp_path: Path, number: int, to: str) -> None:
    host, events = a_host(tmp_path, {})
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if to == "server":  # which leaves it to the host
        after_three_steps(tmp_path, lambda: os.kill(server, number))
        assert host.run() == 0
    else:
        after_three_steps(
            tmp_path, lambda: os.kill(os.getpid() if to == "host" else worker_of(tmp_path, 1), number)
        )
        assert host.run() == (INTERRUPTED if number == signal.SIGINT else RESUME_ME)
        assert 3 <= len(steps_of(tmp_path, 0)) < STEPS
    assert not events


@pytest.mark.parametrize("saved", [True, False])
def test_a_worker_lost_while_stopping_is_no_failure_where_a_checkpoint_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    host, _ = a_host(tmp_path, {"die while stopping": 0})
    if saved:
        (tmp_path / "saved").write_text("4")
    after_three_steps(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    lost = "a worker was lost while the run was stopping: worker 1 ended with status 9"
    if saved:
        assert host.run() == RESUME_ME
        error = capsys.readouterr().err
        assert error.startswith(f"warning: {lost}")
        assert error.endswith("the same command goes on from step 4\n")
    else:
        with pytest.raises(RunFailed, match=f"{lost}.*; no checkpoint is whole"):
            host.run()


def test_a_worker_that_does_not_let_go_of_a_broken_team_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "PARTING_SECONDS", 0.2)
    host, events = a_host(tmp_path, {"die": 5})  # the worker in slot 0 knows nothing of it and goes on
    assert host.run() == 0
    assert len(events) == 1
    assert steps_of(tmp_path, 0)[-1] == STEPS


def test_a_slot_in_which_no_worker_comes_up_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "RETRY_SECONDS", 0.5)
    host, events = a_host(tmp_path, {})
    host.start = partial(_fails_to_start_twice, str(tmp_path), host.start)
    assert host.run() == 0
    assert [event for event, _ in events].count("slot_rests") == 1


def _fails_to_start_twice(folder: str, real: Any, slot: int, pipe: Any) -> None:
    marks = list(Path(folder).glob("born-*"))
    if slot == 1 and len(marks) < 2:
        (Path(folder) / f"born-{len(marks)}").touch()
        os._exit(3)
    real(slot, pipe)


@pytest.mark.parametrize(("error", "expected"), [("user", UserError), ("bug", RunFailed)])
def test_workers_that_cannot_start_end_the_run_with_the_reason(
    tmp_path: Path, error: str, expected: type[Exception]
) -> None:
    host, _ = a_host(tmp_path, {})
    host.start = partial(_cannot_start, error)
    with pytest.raises(expected, match="the data is gone"):
        host.run()


def _cannot_start(error: str, slot: int, pipe: Any) -> None:
    link = HostLink(pipe, str, lambda worker: None)
    link.failed(UserError("the data is gone") if error == "user" else ValueError("the data is gone"))
    os._exit(1)


@pytest.mark.parametrize(("generation", "step", "status"), [(1, 0, None), (2, 9, 0)])
def test_a_late_word_of_an_earlier_team_says_nothing_about_the_present_one(
    tmp_path: Path, generation: int, step: int, status: int | None
) -> None:
    host, _ = a_host(tmp_path, {}, workers=1)
    host._generation, host._members = 2, {0: 0}
    worker = WorkerProcess(
        0, multiprocessing.Process(), multiprocessing.Pipe()[0], "working", generation, step=8, phase="step"
    )
    host._receive(worker, Progress("step", 9))
    host._receive(worker, Done(0))
    report = host._report()
    assert (report.generation, report.step, report.done) == (2, step, status)


def test_a_worker_of_a_broken_team_is_told_once_to_leave_it(tmp_path: Path) -> None:
    host, _ = a_host(tmp_path, {}, workers=1)
    pipe, to_worker = multiprocessing.Pipe()
    worker = WorkerProcess(0, multiprocessing.Process(), to_worker, "working", generation=1)
    team = Team(2, (Member("a", 0),), plan_for(1), "10.0.0.1", 5, "name", 1.5)
    for _ in range(2):
        host._direct_working(worker, team, Orders(team=team), late=False)
    assert pipe.poll()
    assert pipe.recv() == TeamBroke()
    assert not pipe.poll()


def test_the_death_by_a_signal_without_a_name_is_a_fault_too(tmp_path: Path) -> None:
    process = SimpleNamespace(exitcode=-(signal.SIGRTMIN + 1))
    worker = WorkerProcess(0, cast(Any, process), multiprocessing.Pipe()[0])
    cause = fault_of_dead_worker(worker, tmp_path).cause
    assert f"was ended by signal {signal.SIGRTMIN + 1}." in cause


def test_a_worker_says_a_bounded_part_of_why_it_failed() -> None:
    said = _said_by(_fails_with_a_long_text)
    assert isinstance(said, Failed)
    team = Team(2, (Member("a", 0),), plan_for(1), "10.0.0.1", 5, "name", 1.5, said.fault)
    orders = Orders("work", team, message=said.fault.trace)
    assert len(Channel(b"key", "leader").line(orders.to_json())) < LINE_BYTES
    assert "the beginning" in said.fault.cause
    assert "the end" in said.fault.cause


def _fails_with_a_long_text(pipe: Any) -> None:
    noise = random.Random(0).randbytes(1 << 20).hex()
    HostLink(pipe, str, lambda worker: None).failed(ValueError(f"the beginning {noise} the end"))
    os._exit(1)


def test_storage_that_cannot_be_read_now_is_worth_another_attempt() -> None:
    said = _said_by(_cannot_read)
    assert isinstance(said, Failed)
    assert (said.fault.status, said.fault.cause, said.fault.trace) == (
        None,
        "x cannot be read: it does not answer",
        "",
    )


def _cannot_read(pipe: Any) -> None:
    HostLink(pipe, str, lambda worker: None).failed(Unreadable("x cannot be read: it does not answer"))
    os._exit(1)


@pytest.mark.parametrize(("code", "hint"), [(-signal.SIGABRT, True), (1, True), (-signal.SIGKILL, False)])
def test_limits_that_are_set_are_named_where_a_worker_died_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, hint: bool
) -> None:
    process = SimpleNamespace(exitcode=code)
    worker = WorkerProcess(0, cast(Any, process), multiprocessing.Pipe()[0])
    for limit, words in (
        ([], ""),
        (["a process may have little"], ". A limit may be the cause: a process may"),
    ):
        monkeypatch.setattr(worker_process, "limits_set", lambda limit=limit: limit)
        assert (words in fault_of_dead_worker(worker, tmp_path).cause) == (hint or not words)


@pytest.mark.parametrize(
    ("generation", "steps", "status"), [(1, 0, 2), (1, 1, 2), (1, 2, None), (2, 0, None)]
)
def test_a_limit_that_the_first_step_reaches_ends_the_run(
    generation: int, steps: int, status: int | None
) -> None:
    said = _said_by(partial(_reaches_a_limit, generation, steps))
    assert isinstance(said, Failed)
    assert said.fault.status == status
    assert said.fault.cause.startswith("a process may have at most ")
    assert said.fault.cause.endswith("ulimit -v unlimited" if status else "at step 1")


def _reaches_a_limit(generation: int, steps: int, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, resource.getrlimit(resource.RLIMIT_AS)[1]))
    parent, child = multiprocessing.Pipe()
    link = HostLink(child, str, lambda worker: None)
    team = Team(generation, (Member("a", 0),), plan_for(1), "", 0, "", 0.0)
    parent.send(JoinTeam(Worker(0, 1, 0, 1, "", 0, "test", generation), team))
    link.next_team()
    for step in range(steps):
        link.progress("step", step)
    error = MemoryError()
    error.add_note("rank 0 was at step 1")
    link.failed(error)
    messages = [parent.recv() for _ in range(steps + 2)]
    pipe.send(messages[-1])
    os._exit(1)


def test_a_signal_that_a_module_handles_for_itself_asks_nobody_to_stop() -> None:
    assert _said_by(_alarms_itself_and_terminates) == Signalled(signal.SIGTERM)


def _alarms_itself_and_terminates(pipe: Any) -> None:
    HostLink(pipe, str, lambda worker: None)
    signal.signal(signal.SIGALRM, lambda *_: None)
    for number in (signal.SIGALRM, signal.SIGTERM):
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # so that each is read by itself
    time.sleep(10)


def _said_by(work: Any) -> Any:
    """The first word of a worker that does this."""
    worker, ours = _forked(work)
    try:
        return ours.recv()
    finally:
        worker.kill()
        worker.join()


@pytest.mark.parametrize(("phase", "hangs"), [("step", True), ("evaluate", True), ("save", False)])
def test_a_save_may_take_as_long_as_it_needs(phase: Any, hangs: bool) -> None:
    worker = WorkerProcess(
        0, multiprocessing.Process(), multiprocessing.Pipe()[0], "working", 1, step=8, phase=phase
    )
    worker.seconds.append(0.5)
    assert (worker.hang_limit(Recovery(hang_seconds=1.0)) < 1800.0) == hangs


def _forked(work: Any) -> tuple[Any, Any]:
    """A process that does this with one end of a pipe, and the other end."""
    start_server(["shardwise.resilience.worker_link"])
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(theirs,), daemon=True)
    worker.start()
    theirs.close()
    return worker, ours


def test_a_worker_ends_when_its_host_is_gone() -> None:
    worker, ours = _forked(_wait_for_a_team)
    assert ours.recv() == Waiting()
    ours.close()  # as the system does when a host is killed
    worker.join(10)
    left = worker.is_alive()
    worker.kill()
    assert not left


def _wait_for_a_team(pipe: Any) -> None:
    HostLink(pipe, str, lambda worker: None).next_team()


def test_a_run_that_waits_for_workers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_module, "SAY_SECONDS", 0.2)
    host, _ = a_host(tmp_path, {})
    assert host.leader is not None
    host.leader.bounds = Bounds(3, 3)
    threading.Timer(1.0, lambda: setattr(host.leader, "bounds", Bounds(2, 2))).start()
    assert host.run() == 0
    assert capsys.readouterr().err == "waiting for workers: 2 are available, at least 3 are needed\n"


def test_a_server_that_was_stopped_freezes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can neither tell that a worker has died nor fork another, until it is let go on."""
    monkeypatch.setattr(host_module, "SERVER_SECONDS", 0.2)
    (tmp_path / "gone-5").touch()
    host, events = a_host(tmp_path, {"die": 5})

    def stop() -> None:
        while not (tmp_path / "log").exists() or len(steps_of(tmp_path, 0)) < 2:
            time.sleep(0.01)
        os.kill(server_pid() or 0, signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    assert host.run() == 0
    assert [(event, facts["kind"], facts["rank"]) for event, facts in events] == [("fault", "died", 1)]
    assert steps_of(tmp_path, 1) == list(range(1, STEPS + 1))


def test_a_server_that_does_not_answer_is_named_and_the_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwise.resilience.worker_process.start_process", lambda process, seconds, given_up: False
    )
    monkeypatch.setattr(host_module, "SILENT_SERVER_SECONDS", -1.0)
    host, events = a_host(tmp_path, {})
    with pytest.raises(
        RunFailed, match=rf"no worker comes up on here: the process .*\(pid {server_pid()}\) did not answer"
    ):
        host.run()
    assert [event for event, _ in events].count("slot_rests") == 2


class PretendedLeaderServer:
    """Another host that calls, and what it was told."""

    def __init__(self, when_called: Callable[[], None]) -> None:
        self.told: list[Orders] = []
        self.refusals: list[Refusal] = []
        self._when_called = when_called

    def new_reports(self) -> list[tuple[Report, float]]:
        self._when_called()
        return [(Report("there", "10.0.0.2", (0, 1)), time.monotonic())]

    def new_refusals(self) -> list[Refusal]:
        refusals, self.refusals = self.refusals, []
        return refusals

    def refuse(self, refused: Refusal) -> None:
        self.told.append(refused.orders())

    def tell(self, orders: Orders) -> None:
        self.told.append(orders)

    def all_know(self, hosts: set[str]) -> bool:
        return hosts == {"there"}


@pytest.mark.parametrize("why", ["a signal", "no worker"])
def test_a_leader_that_ends_before_training_has_begun_tells_the_other_hosts(tmp_path: Path, why: str) -> None:
    host, _ = a_host(tmp_path, {})
    stop = partial(os.kill, os.getpid(), signal.SIGTERM) if why == "a signal" else list
    server = PretendedLeaderServer(stop)
    host.leadership = cast(
        Any,
        SimpleNamespace(leader_server=server, check=lambda: None, is_lost=lambda: False),
    )
    if why == "a signal":
        assert host.run() == RESUME_ME
        assert (server.told[-1].wish, server.told[-1].status, server.told[-1].message) == (
            "end",
            RESUME_ME,
            "",
        )
    else:
        host.start = partial(_cannot_start, "user")
        with pytest.raises(UserError):
            host.run()
        assert (server.told[-1].wish, server.told[-1].status) == ("end", UserError.status)
        assert "the data is gone" in server.told[-1].message


def test_a_host_that_takes_over_reports_the_address_that_it_has_by_then(tmp_path: Path) -> None:
    host, _ = a_host(tmp_path, {})
    host.leadership = cast(
        Any, SimpleNamespace(address="10.0.0.7", silence=lambda: 0.0, take_over=lambda: host.leader)
    )
    host._on_leader_unreachable()
    assert host._report().address == "10.0.0.7"


def test_a_run_records_a_host_that_it_refuses_and_trains_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host, events = a_host(tmp_path, {})
    server = PretendedLeaderServer(list)

    def refuse() -> None:
        server.refusals.append(Refusal("c", 2, "host c was started with another job"))

    after_three_steps(tmp_path, refuse)
    host.leadership = cast(
        Any,
        SimpleNamespace(leader_server=server, check=lambda: None, is_lost=lambda: False),
    )
    assert host.run() == 0
    assert events == [("refused", {"host": "c", "cause": "host c was started with another job"})]
    assert capsys.readouterr().err == "refused: host c was started with another job\n"


def test_a_host_that_does_not_lead_offers_a_slot_once_a_worker_has_come_up_in_it(tmp_path: Path) -> None:
    host, _ = a_host(tmp_path, {})
    host.leader = None
    assert host._report().slots == ()
    worker = WorkerProcess(1, multiprocessing.Process(), multiprocessing.Pipe()[0])
    host._receive(worker, Waiting())
    assert host._report().slots == (1,)
    worker.state = "starting"  # its successor
    assert host._report().slots == (1,)
