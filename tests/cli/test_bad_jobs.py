"""A user's mistake ends with status 2 and one clear message: no traceback, no process left."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shardwise.checkpoint import Manifest
from shardwise.config import read

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]
JOB = "examples/quickstart.toml"


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Status 2, one message that says these words, and nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    flat = " ".join(done.stderr.split())
    for word in words:
        assert word in flat, f"{word!r} is not in: {done.stderr}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.stpes=3"], ["train.stpes", "unknown key", "Did you mean train.steps?"]),
        (["train.steps=many"], ["train.steps = 'many'", "valid integer"]),
        (["train.steps=1.5"], ["train.steps = 1.5"]),
        (["layout.data=3"], ["train.global_batch = 32", "3 data-parallel devices", "use 30 or 33"]),
        (["layout.replica=2", "layout.data=-1", "--workers", "3"], ["3 devices", "does not divide 3"]),
        (["layout.data=4", "--workers", "2"], ["data 4 = 4 devices", "--workers 4"]),
        (
            ["layout.data=-1", "--workers", "2", "--max-workers", "4"],
            ["--max-workers 4", "this machine starts 2"],
        ),
        (["model.heads=6", "model.kv_heads=4"], ["model.kv_heads = 4", "model.heads = 6", "1, 2, 3, 6"]),
        (["data.source=nowhere.txt"], ["nowhere.txt"]),
        (["data.source=empty.txt"], ["empty.txt"]),
        (["model.vocabulary=100"], ["257", "100"]),
        (["data.source=short.txt", "model.max_positions=100000", "data.sequence_length=50000"], ["50000"]),
        (["run.folder=/dev/null/run"], ["run.folder", "/dev/null/run"]),
        (["data.sequence_length=4096"], ["data.sequence_length = 4096", "model.max_positions = 2048"]),
        (["train.micro_batch=5"], ["train.micro_batch = 5", "16 sequences"]),
        (["layout.tensor=3", "layout.data=1"], ["2 key heads", "nearest layout that works: layout."]),
        (
            ["layout.pipeline=8", "layout.data=1"],
            ["at most 4 stages", "nearest layout that works: layout.pipeline=4"],
        ),
        pytest.param(
            ["layout.expert=2"],
            ["no experts", "nearest layout that works: layout.expert=1"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["layout.context=3", "layout.data=1"],
            ["data.sequence_length = 128", "nearest layout that works: layout."],
            marks=pytest.mark.full,
        ),
        (
            ["layout.context=8", "layout.attention=ulysses", "layout.data=1"],
            ["use 'ring'", "layout that works: layout.attention=auto"],
        ),
        (
            ["layout.pipeline=2", "layout.stages=[1, 2]"],
            ["add up to model.layers = 4", "without layout.stages"],
        ),
        (
            ["model.preset=moe-tiny", "layout.expert=3", "layout.data=6", "train.global_batch=6"],
            ["model.experts = 8", "layout.expert="],
        ),
        (["model.preset=lama3-8b"], ["lama3-8b", "Did you mean llama3-8b?"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume", "nowhere"]),
        (["nonsense"], ["section.key=value"]),
        (["run.folder=''"], ["run.folder"]),
        (["layout.dp=2", "layout.data=4"], ["data is given twice"]),
        (["train.clip=inf"], ["train.clip", "finite"]),
        (["model.hidden=100000", "model.layers=100"], ["GiB on each device", "use more devices"]),
        (["observe.wandb=project"], ["pip install 'shardwise[wandb]'"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_bad_value_is_named_with_what_would_work(
    shardwise: Shardwise, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("To be, or not to be.\n")
    refused(shardwise("train", JOB, *overrides), *words)


def test_all_mistakes_of_a_job_are_reported_together(shardwise: Shardwise, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\nheads = "two"\n[train]\nstpes = 1\n[layuot]\ndata = 2\n')
    refused(
        shardwise("train", "job.toml"),
        "job.toml has 4 problems",
        "model.heads",
        "train.stpes",
        "[layuot]",
        "data.source",
    )


def test_a_job_that_is_not_there_or_not_toml(shardwise: Shardwise, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[train\n")
    refused(shardwise("train", "missing.toml"), "missing.toml: no such file")
    refused(shardwise("train", "broken.toml"), "broken.toml is not valid TOML", "line 1")
    refused(shardwise("train", "examples"), "is a folder")


def test_an_unsupported_torch_is_refused_with_the_line_to_install_another(
    shardwise_of_a_user: Shardwise, tmp_path: Path
) -> None:
    facts = tmp_path / "other" / "torch-2.5.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    done = shardwise_of_a_user("train", JOB, PYTHONPATH=f"{facts.parent}:{ROOT}")
    refused(done, "torch 2.5.1 is not supported", "pip install torch==2.13.0")


def test_a_checkpoint_of_another_model_is_refused(shardwise: Shardwise, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-10"
    folder.mkdir(parents=True)
    other = read(ROOT / JOB, ["model.preset=bytes-400k"]).model.model_dump(exclude={"preset"})
    Manifest(10, other, {}, {}, {}, {}, 1, "2.13.0", {}).write(folder)
    done = shardwise("train", JOB, "run.folder=run")
    refused(done, "holds another model", "model.layers (checkpoint 2, job 4)", "checkpoint.resume=never")


@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(name, marks=pytest.mark.full) for name in ("truncate", "remove"))]
)
def test_a_corrupt_shard_is_named(shardwise: Shardwise, tmp_path: Path, damage: str) -> None:
    assert shardwise("data", "prepare", "examples/shakespeare.txt", "shards").returncode == 0
    shard = tmp_path / "shards" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "truncate":
        shard.write_bytes(content[:-2])
    else:
        shard.unlink()
    refused(shardwise("train", JOB, "data.source=shards"), "shard-00000.bin")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["bogus"],
        ["train"],
        ["train", JOB, "--workers", "0"],
        ["train", JOB, "--bogus"],
        ["report"],
        ["data"],
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_words_of_a_command_is_answered_with_its_usage(
    shardwise: Shardwise, words: list[str]
) -> None:
    done = shardwise(*words)
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_run_in_the_same_folder_is_refused(shardwise: Shardwise, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(shardwise("train", JOB, "run.folder=run"), "another run is writing there now")


@pytest.fixture
def without_torch(shardwise_of_a_user: Shardwise, tmp_path: Path) -> Shardwise:
    """Calls `shardwise ARGUMENTS` where a torch that cannot be imported stands in the way; its metadata may
    be looked at."""
    (tmp_path / "trap" / "torch").mkdir(parents=True)
    (tmp_path / "trap" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    return partial(shardwise_of_a_user, PYTHONPATH=f"{tmp_path / 'trap'}:{ROOT}", CUDA_VISIBLE_DEVICES="")


OWN_JOB = "examples/own_model.toml"
TABLELESS = """
from torch import nn

class Body(nn.Module):
    pass

class Mine(Body):
    def forward(self, inputs, targets=None):
        return 0
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "nowhere", "--prompt", "x"], "nowhere: no such folder, or nothing in it"),
        (["checkpoint", "export", "nowhere", "out"], "nowhere: no such folder, or nothing in it"),
        (["checkpoint", "export", "nowhere", "full"], "full is there already and not empty"),
        (["checkpoint", "import", "full", "out"], "full is not a Hugging Face folder"),
        (["checkpoint", "import", "nowhere", "full"], "full is there already and not empty"),
        (["checkpoint", "diff", "nowhere", "full"], "nowhere: no such folder, or nothing in it"),
        (
            ["train", OWN_JOB, "model.module=own.py:Mine", "layout.tensor=2", "layout.data=1"],
            "Mine has no sharding table",
        ),
        (["verify", OWN_JOB, "--against", "plain"], "knows the built-in transformer only"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_what_can_be_refused_without_torch_is(
    without_torch: Shardwise, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "full" / "inner").mkdir(parents=True)
    (tmp_path / "own.py").write_text(TABLELESS)
    refused(without_torch(*words), says)


def test_a_mistake_is_found_before_torch_is_loaded(without_torch: Shardwise) -> None:
    mistakes = ["train.stpes=1", "data.source=nowhere.txt", "model.module=nowhere.py:Model", "layout.data=4"]
    done = without_torch("train", JOB, *mistakes, "--workers", "2")
    refused(done, "train.stpes", "nowhere.txt", "nowhere.py")
    refused(without_torch("train", JOB, "layout.data=4", "--workers", "2"), "4 devices, but 2 are there")
    for command in (["--help"], ["train", "--help"], ["doctor"], ["new", "demo"], ["config", "show", JOB]):
        done = without_torch(*command)
        assert done.returncode == 0, done.stderr
