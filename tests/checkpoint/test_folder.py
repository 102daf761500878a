"""What counts as a checkpoint, which one a run starts from, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, LLAMA, Tables, job, start
from ranks.pool import Pool

from shardwise.checkpoint import checkpoints, hold, read_manifest, step_of, to_resume
from shardwise.checkpoint.folder import MANIFEST, prune, set_aside
from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, faults
from shardwise.config import Config, from_tables
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.train.build import restore, save
from shardwise.train.resume import resume_of
from shardwise.train.steps import steps


@pytest.fixture
def saved(corpus: str, tmp_path: Path) -> Path:
    return Path(save(start(ALONE, job(corpus, run={"folder": str(tmp_path)}))))


def config(corpus: str, folder: Path, resume: str = "auto", **model: object) -> Config:
    return from_tables(
        job(corpus, model={**LLAMA, **model}, checkpoint={"resume": resume}, run={"folder": str(folder)})
    )


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def rewrite(folder: Path, **changes: Any) -> None:
    """Change a manifest, with the checksum that belongs to it: not damage, but a hand that knows the
    format."""
    held = json.loads((folder / MANIFEST).read_text())
    del held["crc32"]
    body = json.dumps({**held, **changes}, indent=1).removesuffix("\n}")
    (folder / MANIFEST).write_text(f'{body},\n "crc32": {zlib.crc32(body.encode())}\n}}\n')


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Other content for a file, with the size and checksum that belong to it."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    rewrite(folder, files={**files, name: {"bytes": len(content), "crc32": zlib.crc32(content)}})


def test_checkpoints_are_listed_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("step-100", "step-20", "step-3", ".step-4.writing", "step-5.old", "notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-7").mkdir()  # a save that never came to its end
    assert [step_of(address) for address in checkpoints(tmp_path)] == [3, 20, 100]
    assert checkpoints(tmp_path / "nowhere") == []


def test_every_file_is_in_the_manifest_with_its_size_and_checksum(saved: Path) -> None:
    held = {path.name: path.read_bytes() for path in saved.iterdir() if path.name != MANIFEST}
    expected = {name: {"bytes": len(content), "crc32": zlib.crc32(content)} for name, content in held.items()}
    assert read_manifest(saved).files == expected
    assert json.loads((saved / MANIFEST).read_text())["format"] == 2
    assert sorted(name.split("-")[0] for name in held) == ["rank", "tensors"]


def test_tensors_begin_at_multiples_of_64_and_are_raw_bytes(saved: Path) -> None:
    for name, stored in json.loads(one(saved, "tensors-*.json").read_text()).items():
        (piece,) = stored["pieces"]
        assert piece["start"] % 64 == 0
        tensor = Contents.open(saved).read(StateKey.parse(name))
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (saved / piece["file"]).read_bytes()[piece["start"] :][: len(content)] == content


def test_a_file_of_another_size_is_named(saved: Path) -> None:
    data = one(saved, "rank-0-*.data")
    with data.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(UserError, match=rf"{data} has \d+ bytes instead of \d+. Remove {saved}"):
        read_manifest(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    data = one(saved, "rank-0-*.data")
    data.unlink()
    with pytest.raises(UserError, match=f"{data} is missing"):
        read_manifest(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a checkpoint: it has no checkpoint\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step": 3}', "[" * 100_000])
def test_a_manifest_that_makes_no_sense_is_the_users_to_mend(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"checkpoint\.json is damaged"):
        read_manifest(saved)


@pytest.mark.parametrize("older", [1, 99])
def test_another_format_is_refused(saved: Path, older: int) -> None:
    rewrite(saved, format=older)
    with pytest.raises(
        UserError, match=rf"checkpoint\.json has format {older}; this version of shardwise reads 2"
    ):
        read_manifest(saved)
    (saved / MANIFEST).write_text(json.dumps({"format": 1, "files": {".metadata": {"bytes": 1, "crc32": 1}}}))
    with pytest.raises(UserError, match=r"checkpoint\.json has format 1; this version of shardwise reads 2"):
        read_manifest(saved)


class Runs:
    """Unpickling this would be noticed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code from a file was run",)


PAYLOAD = pickle.dumps(Runs())


def changed_tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        stored = tensors["model.embedding.weight"]
        for key, value in changes.items():
            (stored if key in stored else stored["pieces"][0])[key] = value

    return change


POISONED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a file elsewhere": changed_tensor(file="../../../etc/passwd"),
    "an absolute path": changed_tensor(file="/etc/passwd"),
    "the manifest as data": changed_tensor(file=MANIFEST),
    "a file that is a list": changed_tensor(file=["rank-0"]),
    "beyond the end of the file": changed_tensor(start=1 << 40),
    "before its beginning": changed_tensor(start=-8),
    "a huge start": changed_tensor(start=1 << 80),
    "a fractional start": changed_tensor(start=0.5),
    "a huge shape": changed_tensor(shape=[1 << 50, 1 << 50]),
    "a negative shape": changed_tensor(shape=[-1, 18]),
    "another shape": changed_tensor(shape=[259, 19]),
    "an offset outside": changed_tensor(offset=[1, 0]),
    "another number of dims": changed_tensor(offset=[0]),
    "no pieces": changed_tensor(pieces=[]),
    "pieces that are no list": changed_tensor(pieces={"0": 1}),
    "an unknown type": changed_tensor(dtype="__import__('os')"),
    "an attribute of torch that is no type": changed_tensor(dtype="load"),
    "a type that is no name": changed_tensor(dtype={"a": 1}),
    "a tensor that is a list": lambda tensors: tensors.update({"model.embedding.weight": [1]}),
}


@pytest.mark.parametrize("kind", POISONED)
def test_a_poisoned_list_of_tensors_is_refused(saved: Path, kind: str) -> None:
    listed = one(saved, "tensors-*.json")
    tensors = json.loads(listed.read_text())
    POISONED[kind](tensors)
    replace_file(saved, listed.name, json.dumps(tensors).encode())
    with pytest.raises(UserError, match=rf"{listed}( does not belong to a checkpoint|): "):
        Contents.open(saved)
    assert [*faults(saved)]


def test_a_pickle_is_never_opened(corpus: str, saved: Path) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(saved.parents[1])}))
    (saved / ".metadata").write_bytes(PAYLOAD)
    with pytest.raises(UserError, match=r"\.metadata is a pickle, which may run code"):
        restore(training, str(saved))
    (saved / ".metadata").unlink()
    for name in (one(saved, "tensors-*.json").name, MANIFEST):
        before = (saved / name).read_bytes()
        (saved / name).write_bytes(PAYLOAD)
        with pytest.raises(UserError, match=name):
            restore(training, str(saved))
        (saved / name).write_bytes(before)
    replace_file(saved, one(saved, "tensors-*.json").name, PAYLOAD)
    with pytest.raises(UserError, match="is not valid JSON"):
        restore(training, str(saved))


@pytest.mark.parametrize(
    "name", ["../rank-0-a.data", "/etc/passwd", ".metadata", "rank-0-a.data/..", "rank-0-A.pt", ""]
)
def test_a_manifest_may_name_only_files_of_a_checkpoint(saved: Path, name: str) -> None:
    rewrite(saved, files={name: {"bytes": 1, "crc32": 1}})
    with pytest.raises(UserError, match=r"checkpoint\.json: files.*should match pattern"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"step": -1},
            {"step": "3"},
            {"world": 0},
            {"model": []},
            {"files": {"rank-0-a.data": 3}},
            {"data": {"tokenizer": 3}},
        ),
        *(
            {"layout": {"data": "x"}},
            {"loss_scale": {"clean_steps": 0}},
            {"loss_scale": {"value": 0.0, "clean_steps": 0}},
        ),
    ],
)
def test_a_manifest_with_senseless_values_is_refused(saved: Path, change: dict[str, Any]) -> None:
    rewrite(saved, **change)
    with pytest.raises(UserError, match=rf"checkpoint\.json: {next(iter(change))}"):
        read_manifest(saved)


def test_a_model_that_the_tensors_do_not_fit_is_not_exported(saved: Path, tmp_path: Path) -> None:
    rewrite(saved, model={**read_manifest(saved).model, "ffn": 51})
    with pytest.raises(
        UserError, match=r"step-0: .* is \(50, 18\), but \(51, 18\) in the model that it says it holds"
    ):
        export_checkpoint(str(saved), tmp_path / "exported")


def flips(folder: Path, seed: int) -> Iterator[Path]:
    """One byte of a file changed, and back again afterwards: each file, the first and last byte and some
    between."""
    draw = random.Random(seed)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(6))}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            yield path
        path.write_bytes(content)


def two_steps(worker: Worker, tables: Tables) -> None:
    training = start(worker, tables)
    generator = steps(training)
    for _ in range(2):
        next(generator)
        save(training)


def fall_back(
    worker: Worker, tables: Tables, seed: int
) -> list[tuple[str, str | None, tuple[tuple[str, str], ...]]]:
    """For each flipped byte in the newest checkpoint: the file, what is chosen instead, and what is said."""
    training, found = start(worker, tables), []
    newest = Path(tables["run"]["folder"]) / "checkpoints" / "step-2"
    files = flips(newest, seed) if worker.rank == 0 else iter([None] * 1000)
    while training.checkpointer._from_main(lambda: str(next(files, ""))):
        chosen = training.checkpointer.choose_checkpoint(resume_of(training.config))
        found.append((chosen.folder, chosen.skipped))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_one_flipped_byte_in_any_file_is_named_and_the_checkpoint_before_is_taken(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, world: int
) -> None:
    tables = job(corpus, layout={"data": world, "zero": 3 if world > 1 else 0}, run={"folder": str(tmp_path)})
    run = (lambda *case: [case[0](ALONE, *case[1:])]) if world == 1 else ranks(world).run
    run(two_steps, tables)
    newest = tmp_path / "checkpoints" / "step-2"
    expected = list(flips(newest, 7))
    assert len({path.name for path in expected}) == 2 + world
    for path in flips(newest, 7):
        assert any(f"{path} is damaged" in told for told in faults(newest))
    assert not [*faults(newest)]
    answers = run(fall_back, tables, 7)
    assert all(answer == answers[0] for answer in answers), "ranks start from different checkpoints"
    for path, (chosen, skipped) in zip(expected, answers[0], strict=True):
        assert chosen == str(tmp_path / "checkpoints" / "step-1")
        ((where, why),) = skipped
        assert where == str(newest)
        assert f"{path} is damaged" in why


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest gone"])
def test_other_damage_to_the_newest_is_passed_over_as_well(corpus: str, tmp_path: Path, damage: str) -> None:
    tables = job(corpus, run={"folder": str(tmp_path)})
    two_steps(ALONE, tables)
    data = one(tmp_path / "checkpoints" / "step-2", "rank-0-*.data")
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "missing":
        data.unlink()
    else:
        (data.parent / MANIFEST).unlink()
    chosen = start(ALONE, tables).checkpointer.choose_checkpoint(resume_of(from_tables(tables)))
    assert chosen.folder == str(tmp_path / "checkpoints" / "step-1")
    assert [str(data) in reason for _, reason in chosen.skipped] == (
        [] if damage == "manifest gone" else [True]
    )
    assert to_resume(resume_of(from_tables(tables))) == chosen.folder


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh_by_itself(
    corpus: str, tmp_path: Path
) -> None:
    tables = job(corpus, run={"folder": str(tmp_path)})
    two_steps(ALONE, tables)
    for path in (tmp_path / "checkpoints").glob("step-*/rank-0-*"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"(?s)has checkpoints, but none that is whole:.*step-2.*step-1.*resume=never"
    ):
        start(ALONE, tables).checkpointer.choose_checkpoint(resume_of(from_tables(tables)))
    with pytest.raises(UserError, match="none that is whole"):
        to_resume(resume_of(from_tables(tables)))


def test_one_flipped_bit_is_noticed_before_anything_is_loaded(corpus: str, saved: Path) -> None:
    shard = one(saved, "rank-0-*.data")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    training = start(ALONE, job(corpus))
    before = {name: value.clone() for name, value in training.parallel.model.state_dict().items()}
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        restore(training, str(saved))
    assert all(
        torch.equal(value, before[name]) for name, value in training.parallel.model.state_dict().items()
    )


def test_auto_takes_the_newest_and_never_takes_none(corpus: str, saved: Path) -> None:
    run = saved.parents[1]
    assert to_resume(resume_of(config(corpus, run))) == str(saved)
    assert to_resume(resume_of(config(corpus, run, "never"))) is None
    assert to_resume(resume_of(config(corpus, run / "fresh"))) is None


def test_a_checkpoint_can_be_given_by_path_and_is_then_not_passed_over(
    corpus: str, saved: Path, tmp_path: Path
) -> None:
    by_path = config(corpus, tmp_path / "other", str(saved))
    assert to_resume(resume_of(by_path)) == str(saved)
    with pytest.raises(UserError, match=r"checkpoint\.resume = '/no/such': no such folder"):
        to_resume(resume_of(config(corpus, tmp_path, "/no/such")))
    data = one(saved, "rank-0-*.data")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(UserError, match=f"{data} is damaged"):
        start(ALONE, job(corpus)).checkpointer.choose_checkpoint(resume_of(by_path))


def test_another_model_is_refused_with_what_differs(corpus: str, saved: Path) -> None:
    other = config(corpus, saved.parents[1], ffn=64, tied=True)
    for asked in (to_resume, start(ALONE, job(corpus)).checkpointer.choose_checkpoint):
        with pytest.raises(UserError) as caught:
            asked(resume_of(other))
        message = str(caught.value)
        assert (
            "holds another model: model.ffn (checkpoint 50, job 64), model.tied (checkpoint False, job True)"
            in message
        )
        assert "checkpoint.resume=never" in message


def test_the_name_of_a_preset_does_not_make_another_model(corpus: str, saved: Path) -> None:
    tables = job(corpus, run={"folder": str(saved.parents[1])})
    tables["model"] = {**LLAMA, "preset": "bytes-400k", "tied": False, "max_positions": 2048}
    assert to_resume(resume_of(from_tables(tables))) == str(saved)


def test_old_checkpoints_are_moved_aside_for_a_fresh_start(saved: Path) -> None:
    run = saved.parents[1]
    assert set_aside(run / "checkpoints") == str(run / "checkpoints.old-1")
    assert checkpoints(run / "checkpoints") == []
    assert set_aside(run / "checkpoints") is None
    read_manifest(run / "checkpoints.old-1" / saved.name)


def empty_checkpoints(folder: Path, *numbers: int) -> None:
    for number in numbers:
        (folder / f"step-{number}").mkdir(parents=True)
        (folder / f"step-{number}" / MANIFEST).write_text("{}")


def test_a_run_that_goes_on_from_an_older_step_moves_only_the_later_ones_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    empty_checkpoints(folder, 5, 10, 15)
    assert set_aside(folder, after=15) is None
    assert set_aside(folder, after=5) == str(tmp_path / "checkpoints.old-1")
    assert [step_of(address) for address in checkpoints(folder)] == [5]
    assert sorted(path.name for path in (tmp_path / "checkpoints.old-1").iterdir()) == ["step-10", "step-15"]


def test_the_newest_are_kept_and_every_nth_for_good(tmp_path: Path) -> None:
    empty_checkpoints(tmp_path, *range(5, 65, 5))
    (tmp_path / "step-33").mkdir()  # never finished
    (tmp_path / "step-33" / "rank-0-a.data").write_bytes(b"half")
    prune(tmp_path, keep=2, keep_every=20)
    assert [step_of(address) for address in checkpoints(tmp_path)] == [20, 40, 55, 60]
    assert not (tmp_path / "step-33").exists()


def test_two_runs_cannot_save_into_one_folder(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another run is saving its checkpoints there now")
    with hold(tmp_path / "shared"), refused, hold(tmp_path / "shared"):
        pass
    with hold(tmp_path / "shared"), hold(tmp_path / "other"), hold("memory://somewhere"):
        assert os.listdir(tmp_path / "shared") == [".lock"]
