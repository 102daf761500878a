"""What people read: numbers with units that suit them, nouns that follow their numbers, help that shows its
brackets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli.app import app
from shardwise.config import read
from shardwise.config.model_config import MIXTRAL, _differences
from shardwise.drivers.registry import driver_of
from shardwise.errors import UserError
from shardwise.optimizers import find
from shardwise.train.describe import peak_of_device

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.toml"


def said(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_small_plan_is_told_in_small_units() -> None:
    text = said("plan", str(QUICKSTART), "cluster.preset=cpu", "layout.data=2")
    assert "1.67M parameters on" in text
    assert "0 device hours" not in text.replace("10 device hours", "")
    assert " days, " not in text
    assert "all 80 steps (328k tokens) take" in text


def test_help_shows_what_is_in_brackets() -> None:
    assert "print the job's [model]." in said("checkpoint", "import", "--help")


def test_a_job_that_names_no_folder_has_one_of_its_own(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.toml").write_text('[data]\nsource = "x.txt"\n')
        assert read(tmp_path / f"{name}.toml").run.folder == f"runs/{name}"
    assert read(tmp_path / "first.toml", ["run.folder=elsewhere"]).run.folder == "elsewhere"
    assert "# the job's name" in said("config", "show", str(tmp_path / "first.toml"))


def test_what_a_family_of_models_lacks_is_not_called_none() -> None:
    model = read(QUICKSTART, ["model.preset=mixtral-8x7b", "data.sequence_length=64", "layout=auto"]).model
    fixed = {**MIXTRAL.fixed, "expert_ffn": None}
    family = cast(Any, SimpleNamespace(fixed=fixed))
    problems = list(_differences(family, model.model_copy(update={"expert_ffn": 64})))
    assert problems == ["model.expert_ffn = 64: such a model has none; leave it out"]


@pytest.mark.parametrize(
    ("file", "device", "known"),
    [("cluster.toml", "cpu", True), (None, "cpu", False), ("x.toml", "cuda", False)],
)
def test_a_measured_peak_is_gone_by_where_it_was_measured(file: str | None, device: str, known: bool) -> None:
    """`plan` shows MFU by the same figure."""
    training = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("cpu")),
        config=SimpleNamespace(train=SimpleNamespace(precision="float32")),
        plan=SimpleNamespace(cluster_file=file, predicted={"device": device, "peak_flops": 1e11}),
    )
    assert peak_of_device(cast(Any, training)) == (1e11 if known else None)


def test_help_shows_descriptions_whole_and_train_among_the_first() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2]
    assert "…" not in listed
    assert "..." not in listed
    assert "weights after a few steps." in " ".join(listed.split())
    names = [line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3].strip()]
    assert names[:6] == ["new", "train", "run", "report", "generate", "plan"]
    assert "..." not in CliRunner().invoke(app, ["checkpoint", "--help"]).output.partition("Commands:")[2]


def test_a_folder_beside_a_preset_and_a_module_is_told_which_may_stand_together(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "bytes-2m"\nmodule = "a.py:A"\npretrained = "folder"\n[data]\nsource = "x.txt"\n'
    )
    with pytest.raises(
        UserError,
        match=r"are all given; keep model\.pretrained alone, or the other two, which may stand together: on "
        r"the command line, model\.pretrained= leaves out the first, and model\.preset= with model\.module= ",
    ):
        read(job)


@pytest.mark.parametrize(
    ("name", "rounds", "says"),
    [
        ("adamw", False, "AdamW, fused kernel"),
        ("adamw", True, "AdamW on bfloat16 weights and states, rounded stochastically"),
        ("1bit-adam", False, "1-bit Adam: AdamW at first"),
        ("sgd", False, "SGD, momentum 0.9, fused kernel"),
        ("lion", False, "Lion"),
        ("lion", True, "Lion on bfloat16 weights and states, rounded stochastically"),
    ],
)
def test_the_header_names_the_optimizer_that_runs(name: str, rounds: bool, says: str) -> None:
    assert find(name)().describe(rounds).startswith(says)


@pytest.mark.parametrize(("every", "says"), [(1, "every step"), (8, "every 8 steps")])
def test_the_header_names_the_outer_steps_of_groups(every: int, says: str) -> None:
    config = read(QUICKSTART, ["train.driver=local", f"local.sync_every={every}"])
    line = driver_of(config).describe_optimizer(config, "AdamW, fused kernel")
    assert line == f"AdamW, fused kernel; an outer step of all groups {says}"
