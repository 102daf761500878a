"""A failed save never hurts an old one. One that is waited for ends as the user's error on every rank, any
other as a warning."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import ALONE, Tables, job, start
from ranks.pool import Pool, RankFailed

from shardwise.checkpoint import checkpoints, read_manifest, storage
from shardwise.checkpoint.save import Saved, SaveFailed
from shardwise.checkpoint.tensor_files import faults
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker
from shardwise.train.build import restore, save
from shardwise.train.resume import resume_of
from shardwise.train.run import check_saves
from shardwise.train.steps import steps


def full_disk(*unused: Any, **more: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def fault(what: str) -> Iterator[None]:
    """A disk that fails on this rank: while tensors are written, or only when the manifest is put in
    place."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "shards":
            patch.setattr(os, "fsync", full_disk)
        elif what == "manifest":
            patch.setattr(storage._Local, "put", full_disk)
        elif what == "limit":  # what the kernel says to one that may write no larger file
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        yield
        if what == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_a_full_disk(worker: Worker, tables: Tables, on: int, what: str, wait: bool) -> tuple[str, str]:
    """Save a step, then fail to save the next because of one rank; what was said, and the step that loads
    afterwards."""
    training = start(worker, tables)
    generator = steps(training)
    next(generator)
    save(training)
    next(generator)
    (first,) = training.checkpointer.outcomes()
    assert isinstance(first, Saved)
    with fault(what if worker.rank == on else "none"):
        if wait:
            with pytest.raises(UserError) as caught:
                save(training)
        else:
            save(training, wait=False)
        training.checkpointer.finish()
    (outcome,) = training.checkpointer.outcomes()
    assert isinstance(outcome, SaveFailed)
    assert not wait or str(caught.value) == outcome.message
    newest = checkpoints(Path(tables["run"]["folder"]) / "checkpoints")[-1]
    restore(training, newest)
    next(steps(training))  # and goes on
    save(training)
    return outcome.message, Path(newest).name


@pytest.mark.parametrize(
    ("on", "what", "wait"),
    [
        (1, "shards", True),
        (0, "manifest", False),
        pytest.param(0, "shards", False, marks=pytest.mark.full),
        pytest.param(0, "shards", True, marks=pytest.mark.full),
        pytest.param(1, "shards", False, marks=pytest.mark.full),
        pytest.param(0, "manifest", True, marks=pytest.mark.full),
        pytest.param(1, "limit", True, marks=pytest.mark.full),
        pytest.param(1, "limit", False, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_on_one_rank_fails_the_save_on_all_ranks_with_the_old_checkpoint_whole(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, on: int, what: str, wait: bool
) -> None:
    tables = job(corpus, layout={"data": 2, "zero": 3}, run={"folder": str(tmp_path)})
    for message, newest in ranks(2).run(save_on_a_full_disk, tables, on, what, wait):
        assert message.startswith(
            f"the checkpoint of step 2 could not be written to {tmp_path / 'checkpoints'}: "
        )
        assert ("File too large" if what == "limit" else "No space left on device") in message
        assert newest == "step-1"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    for name in ("step-1", "step-2"):
        assert not [*faults(tmp_path / "checkpoints" / name)]
        assert len([*(tmp_path / "checkpoints" / name).iterdir()]) == 4  # and no remains


def test_one_device_says_the_same(corpus: str, tmp_path: Path) -> None:
    message, newest = save_on_a_full_disk(
        ALONE, job(corpus, run={"folder": str(tmp_path)}), 0, "shards", True
    )
    assert "No space left on device" in message
    assert newest == "step-1"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds one checkpoint of the small model and half another."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)]
    if (
        os.geteuid() != 0
        or not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("mounting a file system takes root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_keeps_its_old_checkpoint(corpus: str, small_disk: Path) -> None:
    message, newest = save_on_a_full_disk_for_good(small_disk, job(corpus, run={"folder": str(small_disk)}))
    assert "No space left on device" in message
    assert newest == "step-1"
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-1"]


def save_on_a_full_disk_for_good(disk: Path, tables: Tables) -> tuple[str, str]:
    training = start(ALONE, tables)
    generator = steps(training)
    next(generator)
    save(training)
    next(generator)
    (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))
    with pytest.raises(UserError) as caught:
        save(training)
    newest = checkpoints(disk / "checkpoints")[-1]
    restore(training, newest)
    return str(caught.value), Path(newest).name


def test_a_read_only_folder_is_the_users_to_mend_and_what_is_there_can_be_read(
    corpus: str, small_disk: Path
) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(small_disk)}))
    folder = save(training)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"could not be written to .*: \[Errno 30\] Read-only file system"):
        save(training)
    assert not [*faults(folder)]
    restore(training, folder)


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    with pytest.raises(UserError, match="could not be written"):
        save(training)


def test_a_save_that_died_midway_is_no_checkpoint_and_no_obstacle(corpus: str, tmp_path: Path) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    folder = tmp_path / "checkpoints"
    for name in ("step-0", "step-7"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank-0-0a1b.data").write_bytes(b"half")
    assert checkpoints(folder) == []
    assert training.checkpointer.choose_checkpoint(resume_of(training.config)).folder is None
    assert checkpoints(folder) == [] != [save(training)] == checkpoints(folder)
    assert [path.name for path in folder.iterdir()] == ["step-0"]
    assert not (folder / "step-0" / "rank-0-0a1b.data").exists()


@contextmanager
def slow_disk(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which fsync takes until the event is set."""
    goes_on, fsync = threading.Event(), os.fsync
    patch.setattr(os, "fsync", lambda descriptor: (goes_on.wait(60), fsync(descriptor))[1])
    yield goes_on
    goes_on.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_step_it_was_made_at(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}, train={"steps": 6}))
    generator = steps(training)
    next(generator)
    then = {name: value.clone() for name, value in training.parallel.named_parameters()}
    with slow_disk(monkeypatch) as goes_on:
        folder = save(training, wait=False)
        for _ in range(3):
            next(generator)
        assert checkpoints(tmp_path / "checkpoints") == []
        assert training.checkpointer.outcomes() == []
        goes_on.set()
        training.checkpointer.finish()
    (saved,) = training.checkpointer.outcomes()
    assert isinstance(saved, Saved)
    assert (saved.step, saved.folder) == (1, folder)
    assert 0 <= saved.stall_seconds < saved.seconds
    assert saved.bytes == sum(
        path.stat().st_size for path in Path(folder).iterdir() if path.name != "checkpoint.json"
    )
    restore(training, folder)
    assert training.step == 1
    assert all(bool((value == then[name]).all()) for name, value in training.parallel.named_parameters())


def test_the_next_save_waits_for_the_one_in_flight(corpus: str, tmp_path: Path) -> None:
    training = start(
        ALONE, job(corpus, run={"folder": str(tmp_path)}, checkpoint={"keep": 9}, train={"steps": 5})
    )
    for _ in steps(training):
        save(training, wait=False)
    training.checkpointer.finish()
    assert [outcome.step for outcome in training.checkpointer.outcomes()] == [1, 2, 3, 4, 5]
    assert all(not [*faults(folder)] for folder in checkpoints(tmp_path / "checkpoints"))


def test_what_was_given_up_is_never_committed(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    with slow_disk(monkeypatch) as goes_on:
        save(training, wait=False)
        thread = training.checkpointer._in_flight
        assert thread is not None
        began = time.monotonic()
        training.checkpointer.abandon()
        waited = time.monotonic() - began
        goes_on.set()
        thread.join(60)
    assert checkpoints(tmp_path / "checkpoints") == []
    (outcome,) = training.checkpointer.outcomes()
    assert isinstance(outcome, SaveFailed)
    assert "broke up" in outcome.message
    assert waited < 30  # that is, it did not wait for the disk


def lose_a_peer(worker: Worker, tables: Tables) -> str:
    """One of two ranks is gone before its part of a save is done."""
    training = start(worker, tables)
    if worker.rank == 1:
        os._exit(9)
    save(training, wait=False)
    training.checkpointer.finish()
    (outcome,) = training.checkpointer.outcomes()
    assert isinstance(outcome, SaveFailed)
    return outcome.message


@pytest.mark.full
def test_a_peer_that_dies_during_a_save_hangs_nobody_and_nothing_is_committed(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = job(corpus, layout={"data": 2, "zero": 3}, run={"folder": str(tmp_path)})
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 did not answer"):
        ranks(2).run(lose_a_peer, tables, seconds=100)
    assert time.monotonic() - began < 100
    assert checkpoints(tmp_path / "checkpoints") == []


def test_the_same_step_saved_again_replaces_the_files_only_once_it_is_whole(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    folder = Path(save(training))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(storage._Local, "put", full_disk)
    with pytest.raises(UserError):
        save(training)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    save(training)
    after = {path.name for path in folder.iterdir()}
    assert len(after) == 3
    assert after & before.keys() == {"checkpoint.json"}
    read_manifest(folder)


def test_a_run_whose_saves_fail_so_many_times_in_a_row_stops_and_says_why(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = job(
        corpus,
        run={"folder": str(tmp_path)},
        checkpoint={"max_failed_saves": 2, "background": False},
        train={"steps": 9},
    )
    training = start(ALONE, tables)

    def save_a_step(fails: bool) -> None:
        next(generator)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(storage._Local, "put", full_disk)
            save(training, wait=False)
        check_saves(training, training.checkpointer.outcomes())

    generator = steps(training)
    for fails in (True, False, True):
        save_a_step(fails)
    with pytest.raises(
        RunFailed,
        match=r"^2 saves in a row failed.*checkpoint\.max_failed_saves = 2.*step 4 .*No space left on device",
    ):
        save_a_step(fails=True)
    assert [Path(folder).name for folder in checkpoints(tmp_path / "checkpoints")] == ["step-2"]
