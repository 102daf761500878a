"""`shardwise plan JOB --schedule`: the pipeline of a job, drawn and counted without running it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.app import app
from shardwise.errors import ConfigError, UserError

JOB = str(Path(__file__).parents[2] / "examples" / "quickstart.toml")
FOUR = ("layout.pipeline=4", "layout.data=1", "train.micro_batch=4")
"""Four ranks, eight micro-batches of four sequences."""


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", JOB, *arguments])


def test_the_drawing_the_bubble_the_activations_and_the_stages_are_printed() -> None:
    result = plan("--schedule", *FOUR)
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert (
        lines[0] == "1f1b: 4 ranks, 4 stages, 8 micro-batches; bubble 27.3%, at most 4 activations on a rank"
    )
    assert lines[2].startswith("rank 0  F0 F1 F2 F3 .. ")
    assert lines[7].split() == ["rank", "activations", "idle", "stages"]
    assert lines[8].split() == ["0", "4", "27.3%", "0", "(1", "block)"]
    assert result.stderr == ""


def test_json_is_one_object_with_every_action() -> None:
    result = plan("--schedule", "--json", *FOUR, "layout.schedule=zb1p")
    answer = json.loads(result.stdout)
    assert (answer["schedule"], answer["ranks"], answer["micro_batches"]) == ("zb1p", 4, 8)
    assert answer["bubble"] == pytest.approx(3 / (3 * 8 + 3))
    assert answer["bubble_by_cost"] >= answer["bubble"]
    assert answer["peak_activations"] == [4, 4, 4, 4]
    assert answer["stages"] == [1, 1, 1, 1]
    assert answer["rank_of_stage"] == [0, 1, 2, 3]
    assert answer["actions"][0][:5] == ["0F0", "0F1", "0F2", "0F3", "0B0"]


def test_stages_follow_the_schedule_and_the_counts_given() -> None:
    result = plan(
        "--schedule",
        "--json",
        *FOUR,
        "layout.pipeline=2",
        "layout.schedule=zbv",
        "model.layers=7",
        "layout.stages=[1, 2, 3, 1]",
    )
    answer = json.loads(result.stdout)
    assert answer["stages"] == [1, 2, 3, 1]
    assert answer["rank_of_stage"] == [0, 1, 1, 0]


def test_an_open_data_axis_counts_as_one_pipeline_and_a_closed_one_divides_the_batch() -> None:
    assert json.loads(plan("--schedule", "--json", *FOUR, "layout.data=-1").stdout)["micro_batches"] == 8
    assert json.loads(plan("--schedule", "--json", *FOUR, "layout.data=4").stdout)["micro_batches"] == 2


def test_an_open_data_axis_has_the_devices_that_the_cluster_leaves() -> None:
    job = str(
        Path(__file__).parents[2] / "examples" / "llama3-70b-64xh100.toml"
    )  # 512 sequences on 64 devices
    drawn = CliRunner().invoke(
        app, ["plan", job, "--schedule", "--json", "layout.pipeline=4", "train.micro_batch=1"]
    )
    answer = json.loads(drawn.stdout)
    assert answer["micro_batches"] == 512 * 4 // 64
    assert answer["bubble"] == pytest.approx(3 / (32 + 3))
    here = plan(
        "--schedule",
        "--json",
        "layout.pipeline=2",
        "layout.data=-1",
        "train.micro_batch=4",
        "cluster.devices=8",
    )
    assert json.loads(here.stdout)["micro_batches"] == 2
    uneven = plan("--schedule", "layout.pipeline=4", "layout.data=-1", "cluster.devices=6").exception
    assert isinstance(uneven, ConfigError)


def test_the_svg_is_written_and_only_json_is_on_standard_output(tmp_path: Path) -> None:
    result = plan("--schedule", "--json", "--svg", str(tmp_path / "drawing.svg"), *FOUR)
    json.loads(result.stdout)
    assert "drawing.svg" in result.stderr
    assert ElementTree.parse(tmp_path / "drawing.svg").getroot().tag.endswith("svg")


def test_what_cannot_be_done_is_the_users_mistake_and_says_what_to_do(tmp_path: Path) -> None:
    too_deep = plan("--schedule", *FOUR, "layout.pipeline=8").exception
    assert isinstance(too_deep, ConfigError)
    assert "at most 4 stages" in str(too_deep)
    uneven = plan("--schedule", *FOUR, "layout.data=3").exception
    assert isinstance(uneven, ConfigError)
    unwritable = plan("--schedule", "--svg", str(tmp_path / "no" / "where.svg"), *FOUR).exception
    assert isinstance(unwritable, UserError)
    assert "give another path" in str(unwritable)


def test_it_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; main()"
    command = [sys.executable, "-c", script, "plan", JOB, "--schedule", *FOUR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
