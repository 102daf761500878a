"""The checks of `doctor --devices`: what each finds wrong, and that one failure does not hide the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.pool import Pool

from shardwise.config import AXES
from shardwise.mesh import Worker
from shardwise.mesh.nccl import transports
from shardwise.probe import pair_speed
from shardwise.probe.pair_speed import LinkReport, PairSpeed, measure_pairs
from shardwise.proof import device_checks
from shardwise.proof.device_checks import (
    DENSE,
    EXPERTS,
    DeviceReport,
    Devices,
    Row,
    judge_drill,
    judge_pairs,
    judge_together,
    judge_transport,
    layouts,
    pair_lines,
)

Ranks = Callable[[int], Pool]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TEXT = Path(__file__).parents[2] / "examples" / "shakespeare.txt"
EIGHT, SHARED, NONE = Devices("cuda", 8), Devices("cuda", 1), Devices("cpu", 0)
P2P = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
NET = "h:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"


def links(*speeds: float, correct: bool = True) -> LinkReport:
    """A report in which the pairs 0-1, 0-2, … have these speeds in GB/s."""
    pairs = tuple(PairSpeed(0, other, speed * 1e9, True) for other, speed in enumerate(speeds, 1))
    return LinkReport("NCCL", "2.28.9", pairs, 1e9, correct)


def checks(folder: Path, devices: Devices = NONE) -> Any:
    return device_checks._Checks(devices, TEXT, folder, lambda what: None)


# Which workers


@pytest.mark.parametrize(
    ("gpus", "workers", "of_a_proof", "share"),
    [(0, 2, 2, False), (1, 4, 4, True), (2, 2, 2, False), (3, 3, 2, False), (8, 8, 8, False)],
)
def test_every_gpu_is_measured_and_a_power_of_two_is_proven(
    gpus: int, workers: int, of_a_proof: int, share: bool
) -> None:
    devices = Devices("cuda" if gpus else "cpu", gpus)
    assert (devices.workers, devices.proof_workers, devices.share) == (workers, of_a_proof, share)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_four_layouts_are_possible_and_use_every_axis(tmp_path: Path, workers: int) -> None:
    used = set()
    for layout in layouts(workers).values():
        config = checks(tmp_path).job(layout, EXPERTS if "expert" in layout else DENSE)
        assert config.layout.world == workers
        used |= {axis for axis in AXES if getattr(config.layout, axis) > 1}
    assert used == {*AXES} - {"replica"}


# Links


def pairs_of(worker: Worker) -> LinkReport:
    return measure_pairs(worker, "cpu", None)


def pairs_with_a_wrong_sender(worker: Worker) -> LinkReport:
    """Rank 2 sends other numbers than it should."""
    right = pair_speed._message
    wrong = worker.rank == 2
    pair_speed._message = lambda rank, count, device: right(rank, count, device) + (wrong and rank == 2)
    try:
        return measure_pairs(worker, "cpu", None)
    finally:
        pair_speed._message = right


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_speed, "WINDOW_SECONDS", 0.001)


def test_every_pair_is_measured_and_what_arrives_is_checked(ranks: Ranks) -> None:
    reports = ranks(3).run(pairs_of)
    assert reports == [reports[0]] * 3
    assert [(pair.first, pair.second) for pair in reports[0].pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.correct and pair.bytes_per_second > 0 for pair in reports[0].pairs)
    assert (reports[0].backend, reports[0].sum_is_correct) == ("gloo", True)
    assert reports[0].together > 0


def test_wrong_numbers_are_found_and_the_pairs_named(ranks: Ranks) -> None:
    report = ranks(3).run(pairs_with_a_wrong_sender)[0]
    assert [pair.correct for pair in report.pairs] == [True, False, False]
    assert not report.sum_is_correct
    row = judge_pairs(report)
    assert (row.state, row.words) == ("fail", "wrong numbers arrived between 0-2, 1-2")


@NEEDS_GPU
def test_workers_that_share_a_gpu_are_measured_over_nccl(ranks: Ranks, tmp_path: Path) -> None:
    report = ranks(2).run(measure_pairs, "cuda", tmp_path)[0]
    assert report.backend == "NCCL"
    assert report.pairs[0].correct
    assert report.sum_is_correct
    log = "".join(path.read_text() for path in tmp_path.glob("nccl-*.log"))
    assert transports(log).keys() == {"NET/Socket"}


def test_a_pair_that_is_far_slower_than_the_others_fails_by_name() -> None:
    assert judge_pairs(links(100, 90, 80)).state == "pass"
    row = judge_pairs(links(100, 90, 80, 95, 10))
    assert (row.state, row.number) == ("fail", "10.00 GB/s")
    assert row.words == "the median pair has 90.00 GB/s; much slower: 0-5"


def test_a_wrong_sum_fails() -> None:
    assert judge_together(links(1)).state == "pass"
    assert judge_together(links(1, correct=False)).state == "fail"


@pytest.mark.parametrize(
    ("log", "devices", "state", "words"),
    [
        (P2P * 3, EIGHT, "pass", "connections: P2P/CUMEM (3)"),
        (P2P + NET, EIGHT, "fail", "over the network"),
        (NET, SHARED, "pass", "connections: NET/Socket (1)"),
        ("", EIGHT, "fail", "none in NCCL's log"),
    ],
)
def test_gpus_of_one_machine_must_not_need_the_network(
    log: str, devices: Devices, state: str, words: str
) -> None:
    row = judge_transport(links(1), log, devices)
    assert (row.state, row.number) == (state, "NCCL 2.28.9")
    assert words in row.words


def test_the_table_of_pairs_has_both_directions() -> None:
    assert pair_lines(links(2.0, 3.25)) == [
        ["GB/s", "0", "1", "2"],
        ["0", "-", "2.0", "3.2"],
        ["1", "2.0", "-", "-"],
        ["2", "3.2", "-", "-"],
    ]


# Proofs and the drill


def test_a_check_that_raises_is_a_failed_row_with_its_traceback_in_the_folder(tmp_path: Path) -> None:
    def broken() -> Row:
        raise RuntimeError("no such kernel\nmore")

    row = checks(tmp_path).row("verify zero 3", broken)
    assert (row.state, row.number, row.words) == ("fail", "", "RuntimeError: no such kernel")
    assert "in broken" in (tmp_path / "verify-zero-3.txt").read_text()


def test_after_a_proof_has_failed_the_others_run_with_workers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoWorkers:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> str:
            return "shared workers"

        def __exit__(self, *_: object) -> None: ...

    given = []

    def proof(self: object, name: str, config: Any, dtype: str, workers: object) -> Row:
        given.append(workers)
        if name == "verify tensor":
            raise RuntimeError("rank 1 died")
        return Row(name, "pass", "1e-15", "")

    monkeypatch.setattr(device_checks, "Workers", NoWorkers)
    monkeypatch.setattr(device_checks._Checks, "_proof", proof)
    rows = list(checks(tmp_path).proofs())
    states = [(row.name, row.state) for row in rows]
    assert states == [
        ("verify zero 3", "pass"),
        ("verify tensor", "fail"),
        ("verify pipeline", "pass"),
        ("verify context and experts", "pass"),
        ("float8", "pass"),
        ("compile", "skipped"),
    ]
    assert given == ["shared workers", "shared workers", None, None, None]


DRILL = {"pass": True, "failure": None, "faults": [{"seconds_to_recover": 1.23}]}


@pytest.mark.parametrize(
    ("answer", "log", "expected"),
    [
        (DRILL, "", ("pass", "1.2 s")),
        ({**DRILL, "pass": False}, "", ("fail", "1.2 s")),
        ({"pass": False, "failure": "kill after step 3: no\nmore", "faults": []}, "", ("fail", "")),
        (None, "a\nerror: no room", ("fail", "")),
    ],
)
def test_a_drill_passes_only_with_a_result_that_passes(
    answer: object, log: str, expected: tuple[str, str]
) -> None:
    row = judge_drill("" if answer is None else json.dumps(answer), log)
    assert (row.state, row.number) == expected
    if answer is None:
        assert row.words == "error: no room"


def test_a_report_fails_if_one_row_does() -> None:
    rows = (Row("a", "pass", "1", ""), Row("b", "skipped", "", ""))
    report = DeviceReport(NONE, rows, links(1, 2), 1.0)
    assert report.to_json()["pass"]
    failing = replace(report, rows=(*rows, Row("c", "fail", "", "")))
    assert not failing.to_json()["pass"]
    assert [row.name for row in failing.failed] == ["c"]
