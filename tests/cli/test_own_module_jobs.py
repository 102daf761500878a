"""`[model] module = "file.py:Class"` as a user meets it: the example is proven, and a bad module ends in one
message.

That the example trains, alone and on a layout, is seen in tests/docs.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config import read
from shardwise.parallel import build_plain
from shardwise.plans import ModelSpec

Shardwise = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
JOB = "examples/own_model.toml"
LAYOUTS = [
    pytest.param(["layout.tensor=2", "layout.data=2", "layout.zero=3"], id="tensor", marks=pytest.mark.full),
    pytest.param(["layout.data=2", "layout.zero=3"], id="data"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_example_is_proven(shardwise: Shardwise, layout: list[str]) -> None:
    done = shardwise("verify", JOB, *layout, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["pass"]
    assert result["worst"]["relative_error"] < 1e-9
    assert {row["parameter"] for row in result["parameters"]} >= {
        "places.weight",
        "blocks.1.attention.qkv.bias",
        "head.0.weight",
    }


FROZEN = """
import torch
from own_model import OwnModel

class Finetuned(OwnModel):
    def __init__(self, config):
        super().__init__(config)
        self.requires_grad_(False)
        self.head.requires_grad_(True)

    def initial_value(self, name, shape, seed):
        return None if name.startswith("head.") else torch.load("backbone.pt", mmap=True)[name]
"""


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.data=2", "layout.zero=3"],
        pytest.param(["layout.tensor=2", "layout.data=1"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_new_head_on_a_frozen_backbone_is_proven(
    shardwise: Shardwise, tmp_path: Path, layout: list[str]
) -> None:
    """The backbone keeps its bits, and the head gets the gradients of one device."""
    config = read(ROOT / JOB)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in build_plain(ModelSpec.of(config)).named_parameters()
    }
    backbone = {
        name: torch.randn(shape) * 0.1 for name, shape in shapes.items() if not name.startswith("head.")
    }
    torch.save(backbone, tmp_path / "backbone.pt")
    (tmp_path / "own_model.py").write_text((ROOT / "examples" / "own_model.py").read_text())
    (tmp_path / "finetuned.py").write_text(FROZEN)
    job = [JOB, "model.module=finetuned.py:Finetuned", *layout]
    done = shardwise("verify", *job, "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["pass"]
    assert result["worst"]["relative_error"] < 1e-9
    rows = {(row["parameter"], row["quantity"]): row["relative_error"] for row in result["parameters"]}
    assert {name for name, quantity in rows if quantity == "gradient"} == {"head.0.weight"}
    assert all(rows[name, "weight"] == 0 for name in backbone)
    done = shardwise("train", *job, "train.steps=2", "observe.sample_tokens=2", "run.folder=run")
    assert done.returncode == 0, done.stderr
    contents = Contents.open(str(tmp_path / "run" / "checkpoints" / "step-2"))
    for name, value in backbone.items():
        assert torch.equal(contents.read(StateKey.model(name)), value), name
        assert StateKey.optimizer(name, "exp_avg") not in contents.tensors
    (tmp_path / "backbone.pt").unlink()  # a resume asks for no first values
    done = shardwise("train", *job, "train.steps=3", "observe.sample_tokens=2", "run.folder=run")
    assert done.returncode == 0, done.stderr
    resumed = Contents.open(str(tmp_path / "run" / "checkpoints" / "step-3"))
    assert all(torch.equal(resumed.read(StateKey.model(name)), value) for name, value in backbone.items())


OWN = """
import torch
from torch import nn
from shardwise.models.sharding import Sharding, vocabulary

class Mine(nn.Module):
    sharding = Sharding({"table": vocabulary()})

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocabulary, config.hidden)
        self.scores = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, inputs, targets=None):
        return self.scores(self.table(inputs))

class Unbuildable(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.wdith
"""


@pytest.mark.parametrize(
    ("module", "overrides", "words"),
    [
        ("mine.py:Unbuildable", [], ["mine.py, line 20", "AttributeError", "wdith"]),
        ("mine.py:Mine", ["layout.tensor=2", "layout.data=1"], ["no entry for scores", "docs/sharding.md"]),
    ],
    ids=["fails to build", "no entry"],
)
def test_a_bad_module_is_refused_before_workers_start(
    shardwise: Shardwise, tmp_path: Path, module: str, overrides: list[str], words: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    done = shardwise("train", JOB, f"model.module={module}", "run.folder=run", *overrides)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run" / "logs").glob("rank-*"))
    flat = " ".join(done.stderr.split())
    for word in words:
        assert word in flat, done.stderr


def test_a_module_that_would_let_conversations_see_each_other_is_refused_before_workers_start(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    told = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "nobody"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": told}) + "\n") * 64)
    done = shardwise("train", JOB, "data.source=chat.jsonl", "run.folder=run")
    assert done.returncode == 2, done.stderr
    assert "OwnModel.forward has no argument `documents`" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / ".shardwise").exists()


def test_first_values_from_a_file_that_is_not_there_are_missed_before_workers_start(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    (tmp_path / "own_model.py").write_text((ROOT / "examples" / "own_model.py").read_text())
    (tmp_path / "finetuned.py").write_text(FROZEN)
    done = shardwise("train", JOB, "model.module=finetuned.py:Finetuned", "run.folder=run")
    assert done.returncode == 2, done.stderr
    assert re.search(
        r"error: initial_value\(.* fails: FileNotFoundError: .*backbone.pt' \(\S*finetuned.py, line 12\)",
        done.stderr,
    )
    assert not (tmp_path / "run").exists()


def own_module(folder: Path, name: str, line: str) -> list[str]:
    """The example's module with this line at the beginning of its forward, once there are tensors with
    values."""
    text = (ROOT / "examples" / "own_model.py").read_text()
    (folder / f"{name}.py").write_text(
        text.replace("        x = inputs\n", f"        x = inputs\n        {line}\n")
    )
    few = ["train.steps=2", "train.evaluate_sequences=4", "observe.sample_tokens=2", f"run.folder={name}"]
    return ["train", "examples/own_model.toml", f"model.module={name}.py:OwnModel", "layout.data=2", *few]


def test_a_sample_that_fails_once_all_is_saved_is_a_warning(shardwise: Shardwise, tmp_path: Path) -> None:
    done = shardwise(
        *own_module(tmp_path, "mute", "assert targets is not None or inputs.is_meta, 'nothing to say'")
    )
    assert done.returncode == 0, done.stderr
    assert (
        "warning: all steps are done and saved, but there is no sample: AssertionError: nothing to say"
        in done.stderr
    )
    assert "next:" in done.stderr
    assert (tmp_path / "mute" / "checkpoints" / "step-2" / "checkpoint.json").is_file()


def test_an_exception_in_a_users_own_code_stops_at_its_first_repetition(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    done = shardwise(*own_module(tmp_path, "wrong", "assert inputs.is_meta, 'not today'"))
    assert done.returncode == 1, done.stderr
    events = [json.loads(line) for line in (tmp_path / "wrong" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "fault"] == [1, 1]
    last = done.stderr.splitlines()[-1]
    assert re.match(r"wrong.py, line \d+, in forward: AssertionError: not today; rank \d was at step 1", last)
    assert done.stderr.count("Traceback") == 1
    assert "Traceback" in "".join(log.read_text() for log in (tmp_path / "wrong" / "logs").glob("rank-*.log"))


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_module_that_returns_a_mean_is_told_what_to_return(
    shardwise: Shardwise, tmp_path: Path, command: str
) -> None:
    text = (ROOT / "examples" / "own_model.py").read_text()
    (tmp_path / "mean.py").write_text(text.replace(', reduction="sum")', ")"))
    few = [
        "train.steps=2",
        "train.evaluate_sequences=5",
        "observe.sample_tokens=2",
        "run.folder=run",
        "layout.data=2",
    ]
    done = shardwise(command, JOB, "model.module=mean.py:OwnModel", *few)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    flat = " ".join(done.stderr.split())
    assert "OwnModel.forward returns a mean" in flat
    assert 'reduction="sum"' in flat
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_held_out_loss_that_is_not_finite_is_warned_of(shardwise: Shardwise, tmp_path: Path) -> None:
    done = shardwise(
        *own_module(tmp_path, "blind", "self.norm.eps = 1e-5 if self.training else float('nan')")
    )
    assert done.returncode == 0, done.stderr
    assert "warning: the held-out loss is nan, though the loss of every training step is finite" in " ".join(
        done.stderr.split()
    )
