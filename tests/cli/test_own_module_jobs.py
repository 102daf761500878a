"""`[model] module = "file.py:Class"` as a user meets it: the example is proven, and a bad module ends in one message.

That the example trains, alone and on a layout, is seen in tests/docs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Shardwise = Callable[..., subprocess.CompletedProcess[str]]
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
    assert {row["parameter"] for row in result["parameters"]} >= {"places.weight", "blocks.1.attention.qkv.bias", "head.0.weight"}


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
