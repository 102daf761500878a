import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from shardwise.cli.report import _as_planned, report
from shardwise.config import from_tables, to_toml
from shardwise.cost.cluster import Link
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.cost.clusters import named, requested_cluster
from shardwise.errors import UserError
from shardwise.search.forecast import forecast


@pytest.fixture
def run(tmp_path):
    lines = [
        {"step": step, "loss": loss, "seconds": 0.5, "tokens_per_second": 10.0}
        for step, loss in enumerate((4.0, "NaN", 2.0), start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def invoke(*arguments):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_json_is_one_strict_object_on_standard_output_and_nothing_else(run):
    result = invoke(run, "--json")
    assert result.exit_code == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    answer = json.loads(result.stdout, parse_constant=refuse)
    assert answer["loss"] == {"first": 4.0, "last": 2.0, "minimum": 2.0, "minimum_step": 3}
    assert answer["curve"][1] == [2, "NaN"]
    assert result.stderr == ""


def test_without_json_the_report_is_for_people(run):
    result = invoke(run)
    assert result.exit_code == 0
    assert "4.0000 to 2.0000" in result.stdout
    assert "loss by step" in result.stdout


def test_experts_are_in_the_json_and_drawn(run):
    with (run / "metrics.jsonl").open("a") as file:
        line = {"step": 4, "loss": 2.0, "seconds": 0.5, "tokens_per_second": 10.0}
        file.write(json.dumps({**line, "expert_imbalance": 1.5, "expert_load": [1.25, 0.75]}) + "\n")
    assert json.loads(invoke(run, "--json").stdout)["experts"]["load"] == [1.25, 0.75]
    assert "load of each expert" in invoke(run).stdout


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path):
    assert isinstance(invoke(tmp_path / "absent").exception, UserError)


JOB = {
    "model": {"preset": "bytes-2m"},
    "data": {"source": "none", "sequence_length": 128},
    "train": {"steps": 9, "global_batch": 32, "micro_batch": 16},
    "layout": {"data": 2, "zero": 0},
}
BUSY = ("matmul", "attention", "elementwise", "launch", "recompute")


def planned_run(folder, cluster, steps=9):
    """A run that took 1.5 times what was predicted to compute, twice to communicate, half to update, and 10
    ms for the rest."""
    config = from_tables({**JOB, "cluster": cluster, "run": {"folder": str(folder)}})
    predicted = forecast(config, config.layout, 16, 1, requested_cluster(config.cluster).with_devices(2))
    terms = predicted["step_seconds"]
    spans = {
        "data": 0.005,
        "forward_backward": 1.5 * sum(terms[name] for name in BUSY),
        "exposed_communication": 2 * terms["data"],
        "optimizer": 0.5 * terms["optimizer"],
    }
    seconds = sum(spans.values()) + 0.005
    line = {"loss": 1.0, "seconds": seconds, "tokens_per_second": 4096 / seconds, "spans": spans}
    plan = {
        "layout": config.layout.model_dump(),
        "micro_batch": 16,
        "accumulation": 1,
        "predicted": predicted,
    }
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, steps + 1))
    )
    return config, seconds


@pytest.fixture
def cluster_file(tmp_path):
    path = tmp_path / "cluster.toml"
    slow = replace(named("cpux2"), inside=Link(5e7, 5e-5))  # so that communication is worth learning from
    path.write_text("# my machine\n" + write_cluster(slow))
    return path


def test_calibrating_makes_the_next_forecast_what_was_measured(tmp_path, cluster_file):
    config, seconds = planned_run(tmp_path / "run", {"file": str(cluster_file)})
    result = invoke(tmp_path / "run", "--calibrate")
    assert result.exit_code == 0
    assert "1 to 1.5 on matmul, attention, elementwise, launch, recompute" in result.stdout
    assert "1 to 0.5 on optimizer" in result.stdout
    assert "# my machine" in cluster_file.read_text()
    again = forecast(config, config.layout, 16, 1, requested_cluster(config.cluster).with_devices(2))[
        "step_seconds"
    ]
    assert again["total"] == pytest.approx(seconds - 0.01, rel=1e-4)
    assert again["data"] == pytest.approx(
        2 * read_prediction(tmp_path / "run")["step_seconds"]["data"], rel=1e-4
    )


def read_prediction(folder):
    return json.loads((folder / "plan.json").read_text())["predicted"]


def test_calibrating_twice_by_the_same_run_changes_nothing_more(tmp_path, cluster_file):
    planned_run(tmp_path / "run", {"file": str(cluster_file)})
    invoke(tmp_path / "run", "--calibrate")
    before = cluster_file.read_text()
    answer = json.loads(invoke(tmp_path / "run", "--calibrate", "--json").stdout)
    assert cluster_file.read_text() == before
    assert answer["calibration"]["file"] == str(cluster_file)
    assert {change["term"]: change["after"] for change in answer["calibration"]["changes"]}[
        "matmul"
    ] == pytest.approx(1.5)


def test_a_presets_run_is_calibrated_into_a_file_of_its_own(tmp_path):
    planned_run(tmp_path / "run", {"preset": "cpux2"})
    assert "--cluster FILE" in str(invoke(tmp_path / "run", "--calibrate").exception)
    path = tmp_path / "new.toml"
    assert invoke(tmp_path / "run", "--calibrate", "--cluster", path).exit_code == 0
    found = read_cluster(path, {})
    assert found.device.name == named("cpux2").device.name
    assert found.corrections["matmul"] == pytest.approx(1.5, rel=1e-4)


def refusal(*arguments):
    error = invoke(*arguments).exception
    assert isinstance(error, UserError)
    return str(error)


def test_what_cannot_be_calibrated_is_refused_with_the_reason(run, tmp_path_factory):
    assert "has no prediction" in refusal(run, "--calibrate")
    assert "goes with --calibrate" in refusal(run, "--cluster", "x.toml")
    folder = tmp_path_factory.mktemp("few")
    planned_run(folder / "run", {"preset": "cpux2"}, steps=6)
    assert "4 steps" in refusal(folder / "run", "--calibrate")
    planned_run(folder / "long", {"preset": "cpux2"})
    assert "cannot be written" in refusal(
        folder / "long", "--calibrate", "--cluster", folder / "absent" / "new.toml"
    )
    for length in (252, 300):  # the file beside it, or the file itself, would have too long a name
        assert "File name too long" in refusal(
            folder / "long", "--calibrate", "--cluster", folder / ("x" * length)
        )
    (folder / "notes.toml").write_text("milk = 2\n")
    assert "milk" in refusal(folder / "long", "--calibrate", "--cluster", folder / "notes.toml")
    assert (folder / "notes.toml").read_text() == "milk = 2\n"


def test_a_cluster_file_that_is_gone_is_named(tmp_path, cluster_file):
    planned_run(tmp_path / "run", {"file": str(cluster_file)})
    cluster_file.unlink()
    assert f"'{cluster_file}' of the run is not there" in refusal(tmp_path / "run", "--calibrate")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_report_names_the_finished_checkpoints_wherever_the_job_saves_them(run, tmp_path, elsewhere):
    folder = tmp_path / "elsewhere" if elsewhere else run / "checkpoints"
    if elsewhere:
        (run / "config.toml").write_text(f'[checkpoint]\nfolder = "{folder}"\n')
    for name, finished in (("step-3", True), ("step-6", False)):
        (folder / name).mkdir(parents=True)
        if finished:
            (folder / name / "checkpoint.json").write_text("{}")
    assert json.loads(invoke(run, "--json").stdout)["checkpoints"]["kept_steps"] == [3]


def test_calibrating_predicts_the_layout_that_ran():
    asked = from_tables({**JOB, "layout": {"data": 2, "compression": "auto"}})
    ran = asked.layout.model_copy(update={"compression": "int8", "zero": 1})
    summary = {"layout": ran.model_dump(), "recompute": "full", "cluster_file": None}
    planned = _as_planned(asked, summary)
    assert (planned.layout, planned.train.recompute) == (ran, "full")
