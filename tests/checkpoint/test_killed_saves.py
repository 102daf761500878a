"""Killed at any moment of a save, a run finds a whole checkpoint and goes on from it as if nothing had
happened.

A process trains one step after the other and saves each, until it is killed by SIGKILL at a random moment of
a save; the next one resumes in the same folder. After each kill every checkpoint in the folder must be whole.
In the end the states that were saved on the way, each of them by a process that had resumed from another's
checkpoint, are compared with a run that nobody killed. The processes are fresh ones, because they are
killed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from ctypes import c_int
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import ALONE, Tables, job, start

from shardwise.checkpoint import checkpoints, step_of
from shardwise.checkpoint.save import state_of
from shardwise.checkpoint.state_key import StateKind
from shardwise.checkpoint.tensor_files import Contents, faults
from shardwise.resilience.fork_server import start_server
from shardwise.train.build import Training, restore, save
from shardwise.train.resume import resume_of
from shardwise.train.steps import steps

SECONDS = 60.0


def train_until_killed(tables: Tables, background: bool, saving: Any) -> None:
    """Train and save for ever; `saving` counts the saves that were begun."""
    training = start(ALONE, tables)
    newest = training.checkpointer.choose_checkpoint(resume_of(training.config)).folder
    if newest:
        restore(training, newest)
    for _ in steps(training):
        saving.value += 1
        save(training, wait=not background)


def digest(folder: str) -> str:
    """A hash of every weight and moment in a checkpoint."""
    contents, total = Contents.open(folder), hashlib.sha256()
    for key in sorted(contents.tensors, key=str):
        if key.kind is not StateKind.RANDOM:
            total.update(str(key).encode() + contents.read(key).numpy().tobytes())
    return total.hexdigest()


def digest_in_memory(training: Training) -> str:
    state = state_of(
        training.parallel.named_parameters(), training.optimizer, training.parallel.named_buffers()
    )
    total = hashlib.sha256()
    for key in sorted(state, key=str):
        total.update(str(key).encode() + state[key].numpy().tobytes())
    return total.hexdigest()


def kill_during_a_save(tables: Tables, background: bool, draw: random.Random) -> None:
    start_server(["shardwise.train.steps"])
    context = multiprocessing.get_context("forkserver")
    saving = context.Value(c_int, 0, lock=False)
    process = context.Process(target=train_until_killed, args=(tables, background, saving), daemon=True)
    process.start()
    deadline, wanted = time.monotonic() + SECONDS, draw.randint(1, 4)
    while saving.value < wanted:
        assert process.is_alive(), "the process ended by itself"
        assert time.monotonic() < deadline, "no save in time"
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.03))  # a save takes about that long
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.full)])
def test_killed_at_random_moments_the_newest_checkpoint_is_whole_and_the_run_goes_on_from_it(
    corpus: str, tmp_path: Path, kills: int
) -> None:
    train = {"steps": 100_000, "precision": "float32", "schedule": "constant", "global_batch": 2}
    tables = job(corpus, train=train, run={"folder": str(tmp_path)})
    draw, folder = random.Random(11), tmp_path / "checkpoints"
    found: dict[int, str] = {}
    for number in range(kills):
        kill_during_a_save(tables, number % 2 == 0, draw)
        before = max(found, default=0)
        for address in checkpoints(folder):
            assert not [*faults(address)], f"after kill {number}"
            found[step_of(address)] = digest(address)
        assert max(found, default=0) >= before
    assert max(found) > kills / 2
    training = start(ALONE, tables)
    for step in steps(training):
        if step.step in found:
            assert digest_in_memory(training) == found.pop(step.step), (
                f"step {step.step} was another after a kill"
            )
        if not found:
            break
