"""`shardwise doctor --devices` as a user meets it: one table, the status, and what to send if a row fails."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli import devices as command
from shardwise.errors import UserError
from shardwise.probe.pair_speed import LinkReport, PairSpeed
from shardwise.proof.device_checks import DeviceReport, Devices, Row

PAIRS = (PairSpeed(0, 1, 2e9, True), PairSpeed(0, 2, 3e9, True), PairSpeed(1, 2, 4e9, True))
LINKS = LinkReport("NCCL", "2.28.9", PAIRS, 1e9, True)
GOOD = Row("each pair", "pass", "2.00 GB/s", "slowest of 3 pairs", 1.25)
BAD = Row("compile", "fail", "", "RuntimeError: no compiler", 2.0)

FOUND = [{"name": "torch", "state": "good", "words": "2.13.0"}]
"""What `doctor` finds without using the devices."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Let the checks come to these rows, and leave a log."""

    def pretend(*rows: Row) -> None:
        def check(folder: Path) -> DeviceReport:
            (folder / "nccl-1.log").write_text("what NCCL says")
            (folder / "weights.bin").write_bytes(bytes(10))
            return DeviceReport(Devices("cuda", 3), rows, LINKS, 12.0)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(command, "_check", check)

    return pretend


def test_without_a_failed_row_the_status_is_0_and_nothing_is_left(
    pretended: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pretended(GOOD)
    assert command.check_and_show(False, FOUND) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "result", "number", "seconds", "what", "it", "says"]
    assert lines[1].split()[:5] == ["each", "pair", "pass", "2.00", "GB/s"]
    assert lines[4].split() == ["0", "-", "2.0", "3.0"]
    assert lines[-1] == "PASS: 1 check in 12 s"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_row_is_status_1_and_its_logs_are_in_one_file(
    pretended: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pretended(GOOD, BAD)
    assert command.check_and_show(False, FOUND) == 1
    printed = capsys.readouterr().out
    assert "FAIL: compile; 2 checks in 12 s" in printed
    assert "Send us shardwise-doctor.tar.gz in an issue." in printed
    with tarfile.open(tmp_path / "shardwise-doctor.tar.gz") as archive:
        names = {name.removeprefix("shardwise-doctor/") for name in archive.getnames()}
        assert names == {"report.json", "doctor.json", "nccl-1.log"}
        report = json.load(archive.extractfile("shardwise-doctor/report.json"))  # type: ignore[arg-type]
        found = json.load(archive.extractfile("shardwise-doctor/doctor.json"))  # type: ignore[arg-type]
    assert found == FOUND
    assert report["rows"][1]["words"] == "RuntimeError: no compiler"


def test_a_folder_that_cannot_be_written_costs_only_the_file(
    pretended: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended(BAD)
    monkeypatch.setattr(command, "ARCHIVE", Path("nowhere/file.tar.gz"))
    assert command.check_and_show(False, FOUND) == 1
    assert "Send us this table and the output of `shardwise doctor`" in capsys.readouterr().out


def test_json_is_one_object(pretended: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    pretended(GOOD, BAD)
    assert command.check_and_show(True, FOUND) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"pass", "devices", "rows", "links", "seconds", "archive"}
    assert (answer["pass"], answer["archive"]) == (False, "shardwise-doctor.tar.gz")
    assert answer["rows"][0].keys() == {"name", "state", "number", "words", "seconds"}
    assert answer["links"]["pairs"][0]["bytes_per_second"] == 2e9


def test_under_another_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"doctor --devices: starts workers of its own; .* not under torchrun"
    ):
        command.check_and_show(False, FOUND)


@pytest.mark.full
def test_two_cpu_workers_pass_every_check(shardwise: Callable[..., object]) -> None:
    done = shardwise("doctor", "--devices", "--json")
    answer = json.loads(done.stdout)  # type: ignore[attr-defined]
    assert [(row["name"], row["state"]) for row in answer["rows"]] == [
        ("transport", "pass"),
        ("each pair", "pass"),
        ("all together", "pass"),
        ("verify zero 3", "pass"),
        ("verify tensor", "pass"),
        ("verify pipeline", "pass"),
        ("verify context and experts", "pass"),
        ("float8", "pass"),
        ("compile", "skipped"),
        ("drill, one kill", "pass"),
    ]
    assert done.returncode == 0  # type: ignore[attr-defined]
