"""A drill that cannot fail proves nothing: every forged difference between two runs must be found, and
named."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Manifest
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import write_checkpoint
from shardwise.proof.compare_runs import compare_runs

STEPS = 12
Records = list[dict[str, Any]]


def records() -> Records:
    return [
        {"step": step, "loss": 5.0 / step, "gradient_norm": 1.0 + 1.0 / step, "data": f"{step * 7919:014x}"}
        for step in range(1, STEPS + 1)
    ]


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    names = ("model.a", "model.b", "optimizer.a.exp_avg")
    return {name: torch.randn(40, 3, generator=draw) for name in names}


def write_run(folder: Path, lines: Records, held: dict[str, torch.Tensor], step: int = STEPS) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = Manifest(step, {}, {}, {}, {}, {}, 1, torch.__version__, {})
    keyed = ((StateKey.parse(name), tensor) for name, tensor in held.items())
    write_checkpoint(folder / "checkpoints" / f"step-{step}", manifest, keyed)
    return folder


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    return write_run(tmp_path / "undisturbed", records(), tensors())


def next_float(value: float) -> float:
    """One bit further."""
    return float(
        struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", value))[0] + 1))[0]
    )


def test_the_same_run_is_the_same(undisturbed: Path, tmp_path: Path) -> None:
    same = compare_runs(undisturbed, write_run(tmp_path / "drilled", records(), tensors()), STEPS, None)
    assert same.equal
    assert same.sentences() == []
    assert same.tensors == 3


@pytest.mark.parametrize("key", ["loss", "gradient_norm"])
def test_one_bit_of_one_step_is_found(undisturbed: Path, tmp_path: Path, key: str) -> None:
    lines = records()
    lines[6][key] = next_float(lines[6][key])
    same = compare_runs(undisturbed, write_run(tmp_path / "drilled", lines, tensors()), STEPS, None)
    assert not same.equal
    assert not same.loss_equal
    assert same.losses == [7]
    assert same.weights_equal
    assert same.sentences() == ["steps whose loss differs: 7"]


def test_a_loss_that_is_no_number_is_found_in_every_mode(undisturbed: Path, tmp_path: Path) -> None:
    lines = records()
    lines[2]["loss"] = "NaN"
    drilled = write_run(tmp_path / "drilled", lines, tensors())
    assert compare_runs(undisturbed, drilled, STEPS, None).losses == [3]
    assert compare_runs(undisturbed, drilled, STEPS, 1e-5).losses == [3]


def test_a_step_that_is_there_twice_or_never_is_found(undisturbed: Path, tmp_path: Path) -> None:
    lines = records()
    drilled = write_run(tmp_path / "drilled", [*lines[:5], lines[4], *lines[6:]], tensors())
    same = compare_runs(undisturbed, drilled, STEPS, None)
    assert (same.doubled, same.missing, same.loss_equal) == ([5], [6], False)
    assert (same.data_repeated, same.data_skipped) == ([5], [6])


def test_data_that_is_read_again_in_place_of_other_data_is_found(undisturbed: Path, tmp_path: Path) -> None:
    lines = records()
    lines[8]["data"] = lines[3]["data"]
    same = compare_runs(undisturbed, write_run(tmp_path / "drilled", lines, tensors()), STEPS, None)
    assert (same.data_repeated, same.data_skipped, same.data_differs) == ([9], [9], [])
    assert same.loss_equal
    assert not same.equal


def test_data_in_another_order_is_found(undisturbed: Path, tmp_path: Path) -> None:
    lines = records()
    lines[8]["data"], lines[3]["data"] = lines[3]["data"], lines[8]["data"]
    same = compare_runs(undisturbed, write_run(tmp_path / "drilled", lines, tensors()), STEPS, None)
    assert (same.data_repeated, same.data_skipped, same.data_differs) == ([], [], [4, 9])
    assert not same.equal


def test_data_that_the_undisturbed_run_reads_twice_may_be_read_twice(tmp_path: Path) -> None:
    lines = records()
    for line in lines[6:]:
        line["data"] = lines[line["step"] - 7]["data"]
    runs = [write_run(tmp_path / name, lines, tensors()) for name in ("undisturbed", "drilled")]
    assert compare_runs(*runs, STEPS, None).equal


@pytest.mark.parametrize("name", ["model.b", "optimizer.a.exp_avg"])
def test_one_bit_of_one_weight_is_found_and_named(undisturbed: Path, tmp_path: Path, name: str) -> None:
    held = tensors()
    held[name].view(torch.int32)[17, 1] ^= 1
    same = compare_runs(undisturbed, write_run(tmp_path / "drilled", records(), held), STEPS, None)
    assert not same.weights_equal
    assert not same.equal
    assert list(same.weights) == [name]
    assert name in same.sentences()[0]


def test_a_negative_zero_is_not_a_zero(tmp_path: Path) -> None:
    plus, minus = tensors(), tensors()
    plus["model.a"][0, 0], minus["model.a"][0, 0] = 0.0, -0.0
    runs = [
        write_run(tmp_path / "undisturbed", records(), plus),
        write_run(tmp_path / "drilled", records(), minus),
    ]
    assert not compare_runs(*runs, STEPS, None).weights_equal


def test_a_missing_tensor_and_a_checkpoint_of_another_step_are_found(
    undisturbed: Path, tmp_path: Path
) -> None:
    held = tensors()
    del held["model.b"]
    fewer = write_run(tmp_path / "fewer", records(), held)
    assert compare_runs(undisturbed, fewer, STEPS, None).weights == {"model.b": math.inf}
    earlier = write_run(tmp_path / "earlier", records(), tensors(), STEPS - 1)
    assert not compare_runs(undisturbed, earlier, STEPS, None).weights_equal


def test_after_a_change_of_layout_roundings_pass_and_more_does_not(undisturbed: Path, tmp_path: Path) -> None:
    lines, held = records(), tensors()
    lines[5]["loss"] *= 1 + 3e-6
    lines[5]["gradient_norm"] *= 1 + 3e-6
    held["model.a"] *= 1 + 2e-6
    rounded = write_run(tmp_path / "rounded", lines, held)
    assert not compare_runs(undisturbed, rounded, STEPS, None).equal
    assert compare_runs(undisturbed, rounded, STEPS, 1e-5).equal
    assert not compare_runs(undisturbed, rounded, STEPS, 1e-9).equal
    lines[5]["loss"] *= 1 + 3e-5
    held["model.a"][3, 2] += 0.1
    wrong = compare_runs(undisturbed, write_run(tmp_path / "wrong", lines, held), STEPS, 1e-5)
    assert (wrong.losses, list(wrong.weights)) == ([6], ["model.a"])
