"""Where the hosts of a run find their leader, and when another takes its place."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from pretend import plan_for

from shardwise.errors import RunFailed, UserError
from shardwise.locks import take_lock
from shardwise.resilience import leader_file, leadership
from shardwise.resilience.channel import greeting
from shardwise.resilience.first_node_file import FirstNodeFile
from shardwise.resilience.forked_process import free_port
from shardwise.resilience.host_description import HostDescription
from shardwise.resilience.leader_file import FILE, LeaderFile
from shardwise.resilience.leadership import Leadership
from shardwise.resilience.team import Bounds, Leader, Orders, Report
from shardwise.resilience.team_store import FindPort

HERE = "127.0.0.1"


def seen_by(host: str, folder: Path, given: str | None = None) -> LeaderFile:
    return LeaderFile(folder, host, "run", given, (HERE, 29400))


def test_the_secret_is_for_this_user_alone_and_new_in_every_run(tmp_path: Path) -> None:
    first, second = seen_by("a", tmp_path), seen_by("b", tmp_path)
    assert second.find() == (HERE, 29400, None), "nobody leads yet"
    secrets = set()
    for port in (1, 2):
        credentials = first.begin()
        first.announce("10.0.0.1", port)
        assert second.find() == ("10.0.0.1", port, credentials)
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
        secrets.add(credentials.secret)
    assert len(secrets) == 2
    assert min(len(secret) for secret in secrets) == 64


def test_a_secret_of_the_environment_is_not_written(tmp_path: Path) -> None:
    first, second = (
        seen_by("a", tmp_path, "given by the site"),
        seen_by("b", tmp_path / "elsewhere", "given by the site"),
    )
    credentials = first.begin()
    first.announce("10.0.0.1", 5)
    assert "given by the site" not in (tmp_path / FILE).read_text()
    assert second.find() == (HERE, 29400, credentials), (
        "no folder is shared: the launcher says where the first node is"
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"leader": 3}',
        "[" * 100_000,
        '{"leader": "a", "address": "b", "port": "c", "secret": "d"}',
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert seen_by("a", tmp_path).read() is None


def test_a_leader_is_silent_once_its_number_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(leader_file.time, "monotonic", lambda: now[0])
    first, second = seen_by("a", tmp_path), seen_by("b", tmp_path)
    first.begin()
    first.announce(HERE, 1)
    second.read()
    for _ in range(20):
        now[0] += leader_file.BEAT_SECONDS + 0.1
        assert first.still_leads()
        assert not second.leader_is_silent()
    now[0] += leader_file.SILENT_SECONDS
    assert not second.leader_is_silent() or second.read() is not None
    now[0] += leader_file.SILENT_SECONDS + 1
    assert second.leader_is_silent()
    second.announce(HERE, 2)
    assert not first.still_leads(), "it was stopped for a while, and another has taken over"
    assert second.still_leads()


def others(
    host: str,
    folder: Path,
    port: int,
    hold: Any = nullcontext,
    given: str | None = None,
    version: str = "0.1.0",
) -> Leadership:
    def make_leader(port: FindPort) -> Leader:
        return Leader(Bounds(1, 1), plan_for, 3, port)

    own = HostDescription(host, version)
    meeting = LeaderFile(folder, host, "run", given, (HERE, port))
    return Leadership(own, (HERE, port), meeting, FirstNodeFile(folder, "run"), hold, make_leader)


def in_use() -> Any:
    raise UserError("another run is writing there now")


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "open_store", lambda address: nullcontext(lambda: 5))


def test_a_lost_leader_is_succeeded_by_a_host_that_can_hold_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None
) -> None:
    monkeypatch.setattr(leader_file, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leadership, "TRY_SECONDS", 0.0)
    port = free_port()
    first, second, third = (
        others("a", tmp_path, port),
        others("b", tmp_path, port),
        others("c", tmp_path, port),
    )
    assert second.take_over() is None, "it has never heard of a leader"
    assert first.begin() is not None
    assert second.call(Report("b", HERE, (0,))) is not None
    assert third.call(Report("c", HERE, (0,))) is not None
    first.close()
    second._hold = in_use
    assert second.take_over() is None, "the leader lives: it holds the folder"
    second._hold = nullcontext
    assert second.take_over() is not None
    second.check()
    assert third.call(Report("c", HERE, (0,))) is None, "the leader it knew hung up"
    assert third.call(Report("c", HERE, (0,))) is not None, "its successor is found in the file"
    assert json.loads((tmp_path / FILE).read_text())["leader"] == "b"
    again = others("a", tmp_path, port, in_use)
    assert again.begin() is None, "the first host comes back into a run that another leads"
    assert again.call(Report("a2", HERE, (0,))) is not None
    for host in (second, third, again):
        host.close()


def test_a_first_node_whose_folder_another_run_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with pytest.raises(UserError, match="another run is writing there now"):
        others("a", tmp_path, port, in_use).begin()
    monkeypatch.setattr(leadership, "REFUSED_SECONDS", -1.0)
    stranger = others("a", tmp_path, port)
    with pytest.raises(UserError, match="the run's secret is not known yet: the first node writes"):
        stranger.give_up_if_too_long()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_first_node_that_cannot_write_where_it_is_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = others("a", tmp_path, free_port())
    monkeypatch.setattr(LeaderFile, "_write", full)
    with pytest.raises(
        UserError, match=rf"{FILE}, .*, cannot be written \(No space left on device\); make room there"
    ):
        first.begin()
    first.close()


def test_a_host_that_cannot_take_over_for_want_of_room_leaves_that_to_others_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leader_file, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leadership, "TRY_SECONDS", 0.0)
    held: list[str] = []

    @contextmanager
    def hold() -> Iterator[None]:
        held.append("b")
        yield
        held.remove("b")

    port = free_port()
    first, second = others("a", tmp_path, port), others("b", tmp_path, port, hold)
    assert first.begin() is not None
    assert second.call(Report("b", HERE, (0,))) is not None
    first.close()
    with monkeypatch.context() as disk:
        disk.setattr(LeaderFile, "_write", full)
        for _ in range(2):
            assert second.take_over() is None
            assert (second.leader_server, held) == (None, [])
    assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 1
    assert second.take_over() is not None
    assert held == ["b"]
    second.close()


def test_a_leader_whose_folder_was_deleted_is_found_in_the_new_one_and_keeps_others_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leader_file, "BEAT_SECONDS", -1.0)
    folder = tmp_path / "run"

    def hold() -> Any:
        folder.mkdir(exist_ok=True)
        return take_lock(folder / ".lock", "another run is writing there now")

    first = others("a", folder, free_port(), hold)
    assert first.begin() is not None
    told = json.loads((folder / FILE).read_text())
    shutil.rmtree(folder)
    first.check()
    again = json.loads((folder / FILE).read_text())
    assert again == {**told, "beat": again["beat"]}
    with pytest.raises(UserError, match="another run is writing there now"):
        hold()
    shutil.rmtree(folder)
    with hold():
        first.check()
        (folder / FILE).unlink()
        first.check()
    assert (
        capsys.readouterr().err.count(
            "others are not kept out of the new one: another run is writing there now"
        )
        == 1
    )
    first.close()


def test_a_host_that_does_not_lead_writes_no_file_where_there_is_none(tmp_path: Path) -> None:
    second = seen_by("b", tmp_path)
    assert second.still_leads(lambda: pytest.fail("it holds no folder"))
    assert second.read() is None


def test_the_file_is_removed_by_the_leader_that_ends_the_run_and_by_nobody_else(
    tmp_path: Path, no_store: None
) -> None:
    first, follower = others("a", tmp_path, free_port()), others("b", tmp_path, free_port())
    assert first.begin() is not None
    assert first.leader_server is not None
    first.leader_server.tell(Orders("end"))
    seen_by("c", tmp_path).announce(HERE, 1)
    follower.close()
    first.close()
    assert seen_by("d", tmp_path).read() is not None, "another leads, of whose run nothing is known here"
    for orders, is_left in ((Orders("work"), True), (Orders("end"), False)):
        last = others("a", tmp_path, free_port())
        assert last.begin() is not None
        assert last.leader_server is not None
        last.leader_server.tell(orders)
        last.close()
        assert (tmp_path / FILE).exists() == is_left


def test_a_first_node_whose_folder_is_in_use_looks_a_minute_for_a_leader_that_an_old_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_by("of an earlier run", tmp_path).announce(HERE, free_port())
    first = others("a", tmp_path, free_port(), in_use)
    assert first.begin() is None, "the run may live, and another host lead it"
    assert first.call(Report("a", HERE, (0,))) is None
    first.give_up_if_too_long()
    assert "another run is writing there now (should that be this run: " in first.trouble()
    assert first.patience() == leadership.REFUSED_SECONDS
    monkeypatch.setattr(leadership, "REFUSED_SECONDS", -1.0)
    with pytest.raises(UserError, match=r"^another run is writing there now$"):
        first.give_up_if_too_long()
    first.close()


def test_a_first_node_that_comes_into_a_run_that_lives_says_so_and_then_looks_for_a_leader_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    first = others("a", tmp_path, port)
    assert first.begin() is not None
    second = others("a2", tmp_path, port, in_use)
    assert second.begin() is None
    assert second.call(Report("a2", HERE, (0,))) is not None
    assert (
        f"this run has begun already, led by {HERE}:{port}, and this host takes part in it"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(leadership, "REFUSED_SECONDS", 0.0)
    first.close()
    assert second.call(Report("a2", HERE, (0,))) is None
    second._accepted += 1000
    second.give_up_if_too_long()
    second.close()


def test_hosts_with_a_given_secret_find_their_leader_past_a_file_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None
) -> None:
    """They share no folder, and one of them led an earlier run, whose file lies in its own."""
    monkeypatch.setattr(leader_file, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", 0.0)
    for host in "ab":
        (tmp_path / host).mkdir()
    seen_by("b before", tmp_path / "b", "given by the site").announce(HERE, free_port())
    port = free_port()
    first, second = (others(host, tmp_path / host, port, given="given by the site") for host in "ab")
    assert first.begin() is not None
    answers = [second.call(Report("b", HERE, (0,))) for _ in range(2)]
    assert [answer is not None for answer in answers] == [False, True]
    first.close()
    assert second.call(Report("b", HERE, (0,))) is None
    assert second.take_over() is None, "its own folder does not tell whether the leader lives"
    second.close()


def test_a_host_that_has_read_the_file_finds_its_leader_although_the_file_is_gone(tmp_path: Path) -> None:
    first, second = seen_by("a", tmp_path), seen_by("b", tmp_path)
    credentials = first.begin()
    first.announce("10.0.0.1", 5)
    second.read()
    (tmp_path / FILE).unlink()
    assert second.find() == ("10.0.0.1", 5, credentials)


def test_a_host_takes_over_at_the_address_by_which_it_called_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None
) -> None:
    """When it began it may not have known one: names of the network come later."""
    for module in (leader_file, leadership):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
    port = free_port()
    first = others("a", tmp_path, port)
    monkeypatch.setattr(leadership, "address_towards", lambda address, port: "127.0.0.9")
    second = others("b", tmp_path, port)
    assert first.begin() is not None
    assert second.address == "127.0.0.9"
    assert second.call(Report("b", second.address, (0,))) is not None
    first.close()
    assert second.take_over() is not None
    assert (second.address, json.loads((tmp_path / FILE).read_text())["address"]) == (HERE, HERE)
    second.close()


def test_a_first_node_with_another_job_in_a_folder_that_a_run_uses_is_told_both(
    tmp_path: Path, no_store: None
) -> None:
    port = free_port()
    first, second = others("a", tmp_path, port), others("a2", tmp_path, port, in_use, version="0.2.0")
    assert first.begin() is not None
    assert second.begin() is None
    orders = second.call(Report("a2", HERE, (0,)))
    assert orders is not None
    assert (orders.wish, orders.status) == ("end", 2)
    assert orders.message == (
        "another run is writing there now. To take part in that run instead: host a2 has shardwise 0.2.0, "
        "and the run has shardwise 0.1.0: install the same version on every host"
    )
    for host in (first, second):
        host.close()


def test_a_host_gives_up_on_a_leader_of_an_older_version_and_names_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None
) -> None:
    monkeypatch.setattr("shardwise.resilience.leader_connection.greeting", lambda version: greeting())
    port = free_port()
    first, second = others("a", tmp_path, port), others("b", tmp_path, port)
    assert first.begin() is not None
    assert second.call(Report("b", HERE, (0,))) is None
    monkeypatch.setattr(leadership, "REFUSED_SECONDS", -1.0)
    with pytest.raises(
        UserError,
        match=r"has an older version of shardwise, .*, and this host has 0.1.0: install the same version",
    ):
        second.give_up_if_too_long()
    for host in (first, second):
        host.close()


def test_nodes_that_wait_end_when_the_first_node_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "made by the first node"
    waiting = others("b", folder, free_port())
    with suppress(UserError), FirstNodeFile(folder, "run").report_start_and_failure():
        assert waiting.call(Report("b", HERE, (0,))) is None
        waiting.give_up_if_too_long()
        assert waiting.trouble().startswith("the first node has started, and does not lead the run yet")
        assert waiting.patience() == leadership.GIVE_UP_SECONDS
        raise UserError("no room")
    with pytest.raises(UserError, match=r"^the first node has ended: no room$") as ended:
        waiting.give_up_if_too_long()
    assert ended.value.status == 2
    waiting.close()


@pytest.mark.parametrize("error", [RunFailed("it broke"), KeyboardInterrupt()])
def test_nodes_that_wait_end_with_the_kind_of_failure_of_the_first_node(
    tmp_path: Path, error: BaseException
) -> None:
    waiting = others("b", tmp_path, free_port())
    with pytest.raises(type(error)), FirstNodeFile(tmp_path, "run").report_start_and_failure():
        raise error
    with pytest.raises(
        RunFailed, match=r"^the first node has ended: (it broke|it was stopped \(KeyboardInterrupt\))$"
    ):
        waiting.give_up_if_too_long()
    waiting.close()


@pytest.mark.parametrize(("name", "counts"), [("run", True), ("an earlier run", False), ("", False)])
def test_word_of_a_first_node_from_before_counts_after_a_minute_if_it_is_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    with pytest.raises(UserError), FirstNodeFile(tmp_path, name).report_start_and_failure():
        raise UserError("no room")
    waiting = others("b", tmp_path, free_port())
    waiting.give_up_if_too_long()
    monkeypatch.setattr(waiting, "silence", lambda: leadership.REFUSED_SECONDS + 1)
    if counts:
        assert waiting.patience() == leadership.REFUSED_SECONDS
        with pytest.raises(UserError, match=r"^the first node has ended: no room$"):
            waiting.give_up_if_too_long()
    with FirstNodeFile(tmp_path, "run").report_start_and_failure():  # started again
        waiting.give_up_if_too_long()
    waiting.close()


def test_a_first_node_of_which_nothing_was_heard_is_not_waited_for_as_long_as_one_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_store: None
) -> None:
    port = free_port()
    waiting = others("b", tmp_path, port)
    assert waiting.patience() == leadership.UNHEARD_SECONDS < leadership.GIVE_UP_SECONDS
    assert (
        others("c", tmp_path / "own", port, given="given by the site").patience()
        == leadership.GIVE_UP_SECONDS
    )
    monkeypatch.setattr(waiting, "silence", lambda: leadership.UNHEARD_SECONDS + 1)
    with pytest.raises(
        RunFailed, match=r"the first node writes .*, and this host has not heard from it yet. Is it running"
    ):
        waiting.give_up_if_too_long()
    first = others("a", tmp_path, port)
    assert first.begin() is not None
    waiting.give_up_if_too_long()
    assert waiting.patience() == leadership.GIVE_UP_SECONDS
    for host in (first, waiting):
        host.close()
