from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks.jobs import ALONE, LLAMA, job, start

from shardwise.checkpoint import checkpoints, read_manifest, to_resume
from shardwise.checkpoint.folder import checksum, set_aside
from shardwise.config import Config, from_tables
from shardwise.errors import UserError
from shardwise.train.build import restore, save


@pytest.fixture
def saved(corpus: str, tmp_path: Path) -> Path:
    return save(start(ALONE, job(corpus, run={"folder": str(tmp_path)})))


def config(corpus: str, folder: Path, resume: str = "auto", **model: object) -> Config:
    return from_tables(job(corpus, model={**LLAMA, **model}, checkpoint={"resume": resume}, run={"folder": str(folder)}))


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_checkpoints_are_listed_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("step-100", "step-20", "step-3", ".step-4.writing", "step-5.old", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-3", "step-20", "step-100"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_every_file_is_in_the_manifest_with_its_size_and_checksum(saved: Path) -> None:
    files = read_manifest(saved).files
    assert files == {path.name: checksum(path) for path in saved.iterdir() if path.name != "checkpoint.json"}
    assert {".metadata", "__0_0.distcp"} == files.keys()


def test_a_file_of_another_size_is_named(saved: Path) -> None:
    with (saved / "__0_0.distcp").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(UserError, match=rf"{saved}/__0_0.distcp has \d+ bytes instead of \d+. Remove {saved}"):
        read_manifest(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata is missing"):
        read_manifest(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a checkpoint: it has no checkpoint\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step": 3}', '{"no": "such key"}'])
def test_a_manifest_that_makes_no_sense_is_the_users_to_mend(saved: Path, text: str) -> None:
    (saved / "checkpoint.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        read_manifest(saved)


def test_another_format_is_refused(saved: Path) -> None:
    rewrite(saved, format=99)
    with pytest.raises(UserError, match="checkpoint format 99; this version of shardwise reads 1"):
        read_manifest(saved)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_file_of_the_right_size_is_refused(corpus: str, saved: Path, name: str) -> None:
    shard = saved / name
    shard.write_bytes(bytes(shard.stat().st_size))
    training = start(ALONE, job(corpus, run={"folder": str(saved.parents[1])}))
    with pytest.raises(UserError, match=f"{name} is damaged"):
        restore(training, saved)


def test_one_flipped_bit_is_noticed_before_anything_is_loaded(corpus: str, saved: Path) -> None:
    shard = next(saved.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    training = start(ALONE, job(corpus))
    before = {name: value.clone() for name, value in training.parallel.model.state_dict().items()}
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        restore(training, saved)
    assert all(torch.equal(value, before[name]) for name, value in training.parallel.model.state_dict().items())


def test_auto_takes_the_newest_and_never_takes_none(corpus: str, saved: Path) -> None:
    run = saved.parents[1]
    assert to_resume(config(corpus, run)) == saved
    assert to_resume(config(corpus, run, "never")) is None
    assert to_resume(config(corpus, run / "fresh")) is None


def test_a_checkpoint_can_be_given_by_path(corpus: str, saved: Path, tmp_path: Path) -> None:
    assert to_resume(config(corpus, tmp_path / "other", str(saved))) == saved
    with pytest.raises(UserError, match=r"checkpoint\.resume = '/no/such': no such folder"):
        to_resume(config(corpus, tmp_path, "/no/such"))


def test_another_model_is_refused_with_what_differs(corpus: str, saved: Path) -> None:
    with pytest.raises(UserError) as caught:
        to_resume(config(corpus, saved.parents[1], ffn=64, tied=True))
    message = str(caught.value)
    assert "holds another model: model.ffn (checkpoint 50, job 64), model.tied (checkpoint False, job True)" in message
    assert "checkpoint.resume=never" in message


def test_the_name_of_a_preset_does_not_make_another_model(corpus: str, saved: Path) -> None:
    tables = job(corpus, run={"folder": str(saved.parents[1])})
    tables["model"] = {**LLAMA, "preset": "bytes-400k", "tied": False, "max_positions": 2048}
    assert to_resume(from_tables(tables)) == saved


def test_old_checkpoints_are_moved_aside_for_a_fresh_start(saved: Path) -> None:
    run = saved.parents[1]
    assert set_aside(run) == run / "checkpoints.old-1"
    assert checkpoints(run) == []
    assert set_aside(run) is None
    read_manifest(run / "checkpoints.old-1" / saved.name)


def test_a_run_that_goes_on_from_an_older_step_moves_only_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert set_aside(tmp_path, after=15) is None
    assert set_aside(tmp_path, after=5) == tmp_path / "checkpoints.old-1"
    assert [path.name for path in checkpoints(tmp_path)] == ["step-5"]
    assert sorted(path.name for path in (tmp_path / "checkpoints.old-1").iterdir()) == ["step-10", "step-15"]
