"""A failure of every single call of the file system: a save, a resume, a log and a preparation lose nothing
that was there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.io_faults import KINDS, Crashed, close_files, count_calls, faulty
from ranks.jobs import ALONE, LLAMA, job, start
from torch import Tensor

from shardwise.checkpoint import save as saving
from shardwise.checkpoint.folder import Manifest, checkpoints, step_of
from shardwise.checkpoint.save import Checkpointer, Retention, SaveFailed, State
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, faults
from shardwise.config import Config, Model, from_tables
from shardwise.data.prepare import prepare
from shardwise.data.tokens import Tokens
from shardwise.errors import Unreadable, UserError
from shardwise.observe.record_files import MetricsFile
from shardwise.train.resume import resume_of

WEIGHT = StateKey.model("weight")
QUICK = (2, False, "crash")
"""Of the saves, the one that the usual tests have time for; test_failed_saves.py has errors of a disk."""


def kinds(*quick: str) -> list[Any]:
    """All of them, of which the usual tests have these."""
    return [pytest.param(kind, marks=[] if kind in quick else pytest.mark.full) for kind in KINDS]


@pytest.fixture(scope="module")
def checkpointer(corpus: str) -> Checkpointer:
    return start(ALONE, job(corpus)).checkpointer


def state(step: int) -> State:
    """All of a small run at some step; large enough for two blocks of checksums."""
    numbers = torch.arange(40_000, dtype=torch.float32) + step
    return {
        WEIGHT: numbers.view(200, 200),
        StateKey.optimizer("weight", "step"): torch.tensor(float(step)),
    }


def manifest(step: int) -> Manifest:
    return Manifest(step, Model(**LLAMA).model_dump(exclude={"preset"}), {}, {}, {}, {}, 1, "2", {})


def save(checkpointer: Checkpointer, folder: Path, step: int, keep: int) -> bool:
    """Whether it was said to be saved."""
    try:
        checkpointer.save(str(folder), state(step), manifest(step), Retention(keep))
    except (UserError, Crashed):
        checkpointer.outcomes()
        return False
    (outcome,) = checkpointer.outcomes()
    return not isinstance(outcome, SaveFailed)


def whole(folder: Path) -> set[int]:
    """The steps of the checkpoints that are whole, and hold what was saved at their step."""
    steps = set()
    for address in checkpoints(folder):
        if not [*faults(address)]:
            contents, step = Contents.open(address), step_of(address)
            assert torch.equal(contents.read(WEIGHT), state(step)[WEIGHT])
            steps.add(step)
    return steps


@pytest.mark.parametrize(
    ("keep", "again", "kind"),
    [
        pytest.param(keep, again, kind, marks=[] if (keep, again, kind) == QUICK else pytest.mark.full)
        for kind in KINDS
        for keep, again in ((2, False), (1, False), (2, True))
    ],
)
def test_a_save_that_fails_at_any_call_leaves_a_whole_checkpoint_and_the_next_one_works(
    checkpointer: Checkpointer, tmp_path: Path, kind: str, keep: int, again: bool
) -> None:
    """`keep` 1: the old one is removed after. `again`: the newest step is saved once more."""
    before = tmp_path / "before"
    assert save(checkpointer, before, 1, 2)
    if again:
        assert save(checkpointer, before, 2, 2)
    shutil.copytree(before, tmp_path / "counted")
    calls = count_calls(tmp_path / "counted", lambda: save(checkpointer, tmp_path / "counted", 2, keep))
    assert calls > 20
    for number in range(calls):
        folder = tmp_path / f"at-{number}"
        shutil.copytree(before, folder)
        with faulty(folder, kind, number) as disk:
            said = save(checkpointer, folder, 2, keep)
        assert disk.failed
        left = whole(folder)
        where = f"call {number} ({disk.calls[number]})"
        assert 2 in left if said or again else 1 in left or (2 in left and keep == 1), where
        assert keep == 1 or 1 in left, where
        assert {step_of(address) for address in checkpoints(folder)} - left <= set(), (
            where
        )  # what is listed is whole
        assert save(checkpointer, folder, 3, keep)
        assert 3 in whole(folder), where
        shutil.rmtree(folder)


def config(folder: Path, corpus: str) -> Config:
    return from_tables(job(corpus, checkpoint={"folder": str(folder)}))


@pytest.mark.parametrize("kind", kinds("EIO"))
def test_a_resume_that_fails_at_any_call_loads_what_was_saved_or_nothing_and_changes_no_file(
    checkpointer: Checkpointer, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(saving, "PAUSES", (0.0, 0.0))
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        assert save(checkpointer, folder, step, 2)
    job_of_it = config(folder, corpus)
    held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def resume() -> tuple[int, Tensor]:
        chosen = checkpointer.choose_checkpoint(resume_of(job_of_it)).folder
        assert chosen is not None
        filled = state(0)
        checkpointer._checked = None
        checkpointer.load(chosen, filled, same_world=False)
        return step_of(chosen), filled[WEIGHT]

    calls = count_calls(folder, resume)
    refused: set[type[BaseException]] = set()
    for number in range(calls):
        with faulty(folder, kind, number) as disk:
            try:
                step, weight = resume()
            except (UserError, Crashed) as error:
                refused.add(type(error))
                continue
            finally:
                assert disk.failed
        assert step == 2, f"what cannot be read now may be whole: call {number} ({disk.calls[number]})"
        assert torch.equal(weight, state(2)[WEIGHT]), f"call {number} ({disk.calls[number]})"
    allowed: dict[str, set[type[BaseException]]] = {
        "EIO for good": {Unreadable},
        "crash": {UserError, Unreadable, Crashed},
    }
    assert refused == (refused & allowed.get(kind, set())), "what fails once is tried again"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == held
    assert resume()[0] == 2


@pytest.mark.parametrize("kind", kinds("crash"))
def test_a_preparation_that_fails_at_any_call_goes_on_to_the_same_tokens(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": f"document {number} " * 3}) for number in range(30)))

    def run(folder: Path) -> Callable[[], object]:
        return lambda: prepare(source, "bytes", folder, shard_tokens=500)

    def row(folder: Path) -> list[int]:
        tokens = Tokens.open(folder)
        return [*tokens.read(0, len(tokens)).tolist(), *tokens.boundaries(0, len(tokens)).tolist()]

    calls = count_calls(tmp_path / "whole", run(tmp_path / "whole"))
    expected = row(tmp_path / "whole")
    for number in range(calls):
        folder = tmp_path / f"at-{number}"
        with faulty(folder, kind, number) as disk, suppress(UserError, Crashed):
            run(folder)()
        close_files(folder)  # the process that failed has ended
        run(folder)()
        assert row(folder) == expected, f"call {number} ({disk.calls[number]})"


@pytest.mark.parametrize("kind", kinds("EIO", "crash"))
def test_a_log_that_fails_at_any_call_keeps_what_was_written_and_loses_no_record_of_a_process_that_lives(
    tmp_path: Path, kind: str
) -> None:
    """Steps 1 to 5 are there, the last of them torn; the run goes on from step 3 to step 8."""

    def go_on(folder: Path) -> list[str]:
        said: list[str] = []
        metrics = MetricsFile(folder / "metrics.jsonl", 3, said.append)
        for step in range(4, 9):
            metrics.write({"step": step, "loss": step / 8})
        metrics.close()
        return said

    def begun(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps({"step": step, "loss": step / 8}) + "\n" for step in range(1, 6)]
        (folder / "metrics.jsonl").write_text("".join(lines)[:-9])
        return folder

    def steps(folder: Path) -> list[int]:
        """Of the whole lines."""
        return [
            json.loads(line)["step"]
            for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            if "}\n" in line
        ]

    counted = begun("counted")
    calls = count_calls(counted, lambda: go_on(counted))
    assert steps(counted) == [*range(1, 9)]
    for number in range(calls):
        folder, where = begun(f"at-{number}"), f"call {number}"
        said: list[str] = []
        with faulty(folder, kind, number) as disk, suppress(Crashed):
            said = go_on(folder)
        assert disk.failed
        there = steps(folder)
        assert there[:3] == [1, 2, 3], where
        if kind in (
            "ENOSPC",
            "EIO",
        ):  # a fault that passes: all is written in the end, and what cannot be undone is said
            assert sorted(set(there)) == [*range(1, 9)], where
            assert there == [*range(1, 9)] or said, where
        go_on(folder)
        assert sorted(set(steps(folder))) == [*range(1, 9)], where
