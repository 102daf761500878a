"""An optimizer of the user's own: another package adds it by an entry point, and a job names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config import from_tables, to_toml
from shardwise.errors import ConfigError

CODE = '''
"""Signs of gradients."""

from typing import ClassVar, Literal

from pydantic import Field

from shardwise.optimizers import Optimizer


class SignSGD(Optimizer):
    """signSGD: the sign of the gradient, without any state."""

    title: ClassVar[str] = "signSGD"
    name: Literal["sign-sgd"] = Field("sign-sgd", description="signSGD (Bernstein et al. 2018)")
    scale: float = Field(1.0, gt=0, description="factor on the learning rate")

    @property
    def slots(self):
        return ()

    def update(self, weight, gradient, slots, *, lr, decay, step):
        return weight * (1 - lr * decay) - lr * self.scale * gradient.sign(), ()
'''
ENTRIES = """[shardwise.optimizers]
sign-sgd = sign_sgd:SignSGD
absent = no_such_module:Absent
misnamed = sign_sgd:SignSGD
function = sign_sgd:ClassVar
"""
JOB = """
[model]
preset = "bytes-400k"
layers = 1
[data]
source = "text.txt"
sequence_length = 32
[train]
steps = 2
global_batch = 4
[optimizer]
name = "sign-sgd"
scale = 0.5
[layout]
data = 2
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module and the metadata of a distribution that is installed there."""
    (tmp_path / "sign_sgd.py").write_text(CODE)
    metadata = tmp_path / "sign_sgd-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sign-sgd\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_job_names_an_optimizer_of_another_package(package: Path) -> None:
    config = from_tables({"data": {"source": "x"}, "optimizer": {"name": "sign-sgd", "scale": 0.5}})
    assert config.optimizer.model_dump() == {
        "name": "sign-sgd",
        "weight_decay": 0.1,
        "groups": {},
        "scale": 0.5,
    }
    assert 'name = "sign-sgd"' in to_toml(config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "absent",
            "no_such_module:Absent of sign-sgd cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("misnamed", "declares name = 'sign-sgd'; give both the same name"),
        ("function", "is no subclass of shardwise.optimizers.Optimizer"),
        ("sign-sdg", "unknown optimizer. Did you mean 'sign-sgd'?"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_the_reason(package: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": {"source": "x"}, "optimizer": {"name": name}})
    assert said in str(refusal.value)


def test_workers_train_with_it(package: Path) -> None:
    (package / "job.toml").write_text(JOB)
    (package / "text.txt").write_text("Each worker imports the package by itself. " * 100)
    path = f"{package}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "job.toml", "--workers", "2"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "signSGD" in done.stdout + done.stderr
