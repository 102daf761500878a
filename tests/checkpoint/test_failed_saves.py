"""A failed save never hurts an old one, and ends as the user's error on every rank."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import ALONE, Tables, job, start
from ranks.pool import Pool

from shardwise.checkpoint import checkpoints, folder, read_manifest
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.train.build import restore, save
from shardwise.train.steps import steps


def full_disk(*unused: Any, **more: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_on_a_full_disk(worker: Worker, tables: Tables, on: int, what: str) -> tuple[str, str]:
    """Save a step, then fail to save the next because of one rank; what was said, and the step that loads afterwards."""
    training = start(worker, tables)
    generator = steps(training)
    next(generator)
    save(training)
    next(generator)
    owner, name = {"shards": (os, "fsync"), "manifest": (folder.Manifest, "write")}[what]
    with pytest.MonkeyPatch.context() as patch:
        if worker.rank == on:
            patch.setattr(owner, name, full_disk)
        with pytest.raises(UserError) as caught:
            save(training)
    newest = checkpoints(Path(tables["run"]["folder"]))[-1]
    restore(training, newest)
    return str(caught.value), newest.name


@pytest.mark.parametrize(("on", "what"), [(1, "shards"), (0, "shards"), (0, "manifest")])
def test_a_full_disk_on_one_rank_ends_all_ranks_with_the_old_checkpoint_whole(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, on: int, what: str
) -> None:
    tables = job(corpus, layout={"data": 2, "zero": 3}, run={"folder": str(tmp_path)})
    for message, newest in ranks(2).run(save_on_a_full_disk, tables, on, what):
        assert message.startswith(f"the checkpoint of step 2 could not be written to {tmp_path / 'checkpoints'}: ")
        assert "No space left on device" in message
        assert newest == "step-1"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    read_manifest(tmp_path / "checkpoints" / "step-1")


def test_one_device_says_the_same(corpus: str, tmp_path: Path) -> None:
    message, newest = save_on_a_full_disk(ALONE, job(corpus, run={"folder": str(tmp_path)}), 0, "shards")
    assert "No space left on device" in message
    assert newest == "step-1"


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    with pytest.raises(UserError, match="could not be written"):
        save(training)


def test_a_save_that_died_midway_is_no_checkpoint_and_no_obstacle(corpus: str, tmp_path: Path) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    remains = tmp_path / "checkpoints" / ".step-0.writing"
    remains.mkdir(parents=True)
    (remains / "__0_0.distcp").write_bytes(b"half")
    assert checkpoints(tmp_path) == []
    assert checkpoints(tmp_path) == [save(training)][1:]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0"]
    assert not remains.exists()
