import json

import pytest
import typer
from typer.testing import CliRunner

from shardwise.cli.report import report
from shardwise.errors import UserError


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
