"""`shardwise checkpoint` as a user meets it, on the checkpoints of real runs."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm import Server

from shardwise.checkpoint.compare import compare, distance
from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, write_checkpoint
from shardwise.cli.checkpoint import parse_size
from shardwise.cli.main import main
from shardwise.errors import UserError

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.preset=bytes-400k",
    "model.layers=1",
    "data.held_out=0",
    "data.sequence_length=32",
    "observe.sample_tokens=1",
]
JOB = ["train", "examples/quickstart.toml", *SMALL, "train.global_batch=4", "train.evaluate_every=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm: Server) -> Path:
    """Two runs of nearly the same job: `one`, on one device, saved at steps 2 and 4, and `two`, on two
    devices, at step 2."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "examples").symlink_to(ROOT / "examples")
    for more in (
        ["run.folder=one", "layout.data=1", "train.steps=4", "checkpoint.every=2"],
        ["run.folder=two", "layout.data=2", "layout.zero=3", "train.steps=2", "train.schedule=constant"],
    ):
        train(warm, folder, *more)
    return folder


def train(warm: Server, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = warm.run(*JOB, *arguments, cwd=folder, environment={})
    assert done.returncode == 0, done.stderr
    return done


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, where torch is loaded already."""
    out, errors, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["shardwise", *arguments]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.argv = before
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())


@pytest.mark.parametrize("folder", ["one", "one/checkpoints"])
def test_list_shows_every_checkpoint_of_a_run(place: Path, folder: str) -> None:
    done = call(place, "checkpoint", "list", folder, "--json")
    rows = json.loads(done.stdout)["checkpoints"]
    assert [(row["step"], row["whole"], row["world"]) for row in rows] == [(2, True, 1), (4, True, 1)]
    assert all(row["bytes"] > 1_000_000 and row["saved"] for row in rows)
    shown = call(place, "checkpoint", "list", folder).stdout
    assert "one/checkpoints/step-4" in shown
    assert "whole" in shown


def test_list_takes_one_checkpoint_and_tells_its_layout(place: Path) -> None:
    (row,) = json.loads(call(place, "checkpoint", "list", "two/checkpoints/step-2", "--json").stdout)[
        "checkpoints"
    ]
    assert (row["step"], row["layout"]) == (2, "data 2, zero 3")


def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is(tmp_path: Path) -> None:
    for name in ("runs/[lr=1e-3]", "runs/[/red]"):
        checkpoint_of(tmp_path / name / "step-1", weight=torch.ones(1))
        assert f"{name}/step-1" in call(tmp_path, "checkpoint", "list", name).stdout


def test_a_run_that_saved_elsewhere_is_followed_there(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "one" / "checkpoints", tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(f'[checkpoint]\nfolder = "{tmp_path / "elsewhere"}"\n')
    rows = json.loads(call(tmp_path, "checkpoint", "list", "run", "--json").stdout)["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4]


def test_check_reads_every_byte_and_names_the_damaged_file(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "one", tmp_path / "one")
    assert call(tmp_path, "checkpoint", "check", "one").returncode == 0
    for path in sorted((tmp_path / "one" / "checkpoints" / "step-2").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
        done = call(tmp_path, "checkpoint", "check", "one/checkpoints/step-2", "--json")
        path.write_bytes(whole)
        found = json.loads(done.stdout)
        assert (done.returncode, found["whole"]) == (1, False)
        assert path.name in found["checkpoints"][0]["problems"][0]
    assert json.loads(call(tmp_path, "checkpoint", "check", "one", "--json").stdout)["whole"] is True


def test_a_missing_file_is_seen_by_list_and_by_check(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "one", tmp_path / "one")
    data = next((tmp_path / "one" / "checkpoints" / "step-4").glob("rank-*"))
    data.unlink()
    done = call(tmp_path, "checkpoint", "list", "one", "--json")
    assert [row["whole"] for row in json.loads(done.stdout)["checkpoints"]] == [True, False]
    done = call(tmp_path, "checkpoint", "check", "one")
    assert done.returncode == 1
    assert "step-2: whole" in done.stdout
    assert f"{data.name} is missing" in done.stdout


def test_a_checkpoint_equals_itself_whoever_holds_its_pieces(place: Path, tmp_path: Path) -> None:
    """The pieces of two devices' checkpoint, put together in one file, are the same tensors."""
    contents = Contents.open(place / "two" / "checkpoints" / "step-2")
    write_checkpoint(
        tmp_path / "step-2", contents.manifest, ((name, contents.read(name)) for name in contents.tensors)
    )
    done = call(place, "checkpoint", "diff", "two", str(tmp_path / "step-2"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["equal"], found["compared"]) == (0, True, len(contents.tensors))
    assert "equal to the bit" in call(place, "checkpoint", "diff", "two", str(tmp_path / "step-2")).stdout


def test_diff_tells_what_differs_and_by_how_much(place: Path) -> None:
    done = call(place, "checkpoint", "diff", "one/checkpoints/step-2", "two", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["facts"]["world"] == [1, 2]
    assert found["facts"]["train.schedule"] == ["cosine", "constant"]
    assert "random" in found["left_out"]
    assert not any(row["tensor"].startswith("random") for row in found["differences"])
    first, second = (Contents.open(place / run / "checkpoints" / "step-2") for run in ("one", "two"))
    for row in found["differences"][:3]:
        key = StateKey.parse(row["tensor"])
        gap = (first.read(key) - second.read(key)).abs().max()
        assert row["max_abs"] == pytest.approx(float(gap), rel=1e-5)
    shown = call(place, "checkpoint", "diff", "one/checkpoints/step-2", "two")
    assert "train.schedule: 'cosine' and 'constant'" in shown.stdout
    assert "different:" in shown.stdout


def checkpoint_of(folder: Path, **tensors: torch.Tensor) -> Contents:
    write_checkpoint(
        folder,
        Manifest(1, {}, {}, {}, {}, {}, 1, "2.13", {}),
        ((StateKey.model(name), tensor) for name, tensor in tensors.items()),
    )
    return Contents.open(folder)


def test_missing_tensors_and_other_shapes_and_dtypes_are_differences(tmp_path: Path) -> None:
    first = checkpoint_of(
        tmp_path / "a", same=torch.ones(3), shape=torch.ones(2), dtype=torch.ones(2), first=torch.ones(1)
    )
    second = checkpoint_of(
        tmp_path / "b",
        same=torch.ones(3),
        shape=torch.ones(3),
        dtype=torch.ones(2).half(),
        second=torch.ones(1),
    )
    found = compare(first, second)
    assert not found.equal
    assert (found.only_first, found.only_second) == (["model.first"], ["model.second"])
    assert {row.tensor: row.max_abs for row in found.differences} == {
        "model.shape": None,
        "model.dtype": None,
    }


def test_equal_means_the_same_bits() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert distance(nan, nan.clone()) == (0.0, 0)
    assert distance(torch.tensor([0.0]), torch.tensor([-0.0])) == (0.0, 1)
    assert distance(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 2.5, 4.0])) == (1.0, 2)
    assert distance(torch.zeros(0, 3), torch.zeros(0, 3)) == (0.0, 0)


def test_a_run_goes_to_hugging_face_and_another_begins_with_its_weights(
    warm: Server, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = str(place / "one")
    done = call(tmp_path, "checkpoint", "export", run, "hf", "--shard-size", "200KB", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (found["architecture"], found["files"]) == (
        "LlamaForCausalLM",
        len(list((tmp_path / "hf").glob("*.safetensors"))),
    )
    assert found["checkpoint"].endswith("step-4")
    done = call(tmp_path, "checkpoint", "import", "hf", "start", "--json")
    assert json.loads(done.stdout)["job"]["model"]["layers"] == 1
    done = call(tmp_path, "checkpoint", "diff", run, "start", "--json")
    assert (done.returncode, json.loads(done.stdout)["equal"]) == (0, True)
    # With a learning rate that moves no bit, the run's first checkpoint holds what it began with.
    still = [
        "layout.data=1",
        "train.steps=1",
        "train.warmup=0",
        "train.learning_rate=1e-30",
        "optimizer.weight_decay=0",
    ]
    done = train(warm, tmp_path, *still, "run.folder=next", "checkpoint.resume=start")
    assert "resumed from start" in done.stderr
    first, after = (
        Contents.open(tmp_path / "start"),
        Contents.open(tmp_path / "next" / "checkpoints" / "step-1"),
    )
    assert all(torch.equal(first.read(name), after.read(name)) for name in first.tensors)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nowhere"], "nowhere: no such folder"),
        (["list", "examples"], "examples holds no checkpoint"),
        (["list", "x" * 300], "cannot be read: File name too long"),
        (["check", "nowhere"], "nowhere: no such folder"),
        (["diff", "one", "nowhere"], "nowhere: no such folder"),
        (["export", "one", "one"], "one is there already and not empty"),
        (["export", "one", "out", "--dtype", "int8"], "--dtype int8"),
        (["export", "one", "out", "--shard-size", "big"], "--shard-size big"),
        (["export", "one", "x" * 300], "cannot be read: File name too long. Give another folder."),
        (["import", "x" * 300, "out"], "cannot be read: File name too long"),
        (["import", "examples", "out"], "it has no config.json"),
        (["import", "nowhere", "out"], "it has no config.json"),
    ],
)
def test_a_mistake_is_status_2_and_one_message(place: Path, arguments: list[str], says: str) -> None:
    done = call(place, "checkpoint", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "out").exists()


def test_sizes_are_read_in_both_systems_of_units() -> None:
    assert [parse_size(text) for text in ("1GB", "1GiB", "2.5 mb", "300", "7kb")] == [
        10**9,
        2**30,
        2_500_000,
        300,
        7000,
    ]
    with pytest.raises(UserError, match="500MB"):
        parse_size("0")
