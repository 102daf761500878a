"""Checkpoints at any address that fsspec knows, and checkpoints of weights only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.jobs import ALONE, Tables, job, start, weights

from shardwise.checkpoint import Manifest, checkpoints, read_manifest, set_aside, step_of, to_resume
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.storage import storage
from shardwise.checkpoint.tensor_files import Contents, faults, write_checkpoint
from shardwise.config import from_tables
from shardwise.errors import UserError
from shardwise.train.build import restore, save
from shardwise.train.resume import resume_of
from shardwise.train.steps import steps


def at(address: str, corpus: str, **checkpoint: object) -> Tables:
    return job(corpus, train={"steps": 5}, checkpoint={"folder": address, **checkpoint})


@pytest.mark.parametrize("scheme", ["memory", "file", "plain"])
def test_a_run_saves_to_an_address_and_goes_on_from_it_to_the_bit(
    corpus: str, tmp_path: Path, scheme: str
) -> None:
    address = str(tmp_path) if scheme == "plain" else f"{scheme}://{tmp_path}/checkpoints"
    tables = at(address, corpus, keep=2, keep_every=2)
    training = start(ALONE, tables)
    for done in steps(training):
        save(training, wait=done.step == 5)
    assert [step_of(found) for found in checkpoints(address)] == [2, 4, 5]
    again = start(ALONE, tables)
    chosen = again.checkpointer.choose_checkpoint(resume_of(again.config)).folder
    assert chosen is not None
    restore(again, chosen)
    assert again.step == 5
    before = weights(training)
    assert all(torch.equal(value, before[name]) for name, value in weights(again).items())


def test_damage_at_an_address_is_passed_over(corpus: str, tmp_path: Path) -> None:
    tables = at(f"memory://{tmp_path}/run", corpus)
    training = start(ALONE, tables)
    generator = steps(training)
    for _ in range(2):
        next(generator)
        newest = save(training)
    (data,) = (name for name in storage(newest).names() if name.endswith(".data"))
    content = bytearray(storage(newest).read(data))
    content[100] ^= 4
    storage(newest).put(data, bytes(content))
    assert [*faults(newest)] == [f"{newest}/{data} is damaged"]
    chosen = training.checkpointer.choose_checkpoint(resume_of(from_tables(tables)))
    assert chosen.folder is not None
    assert step_of(chosen.folder) == 1
    storage(newest).remove(data)
    with pytest.raises(UserError, match=f"{data} is missing"):
        read_manifest(newest)


def test_later_checkpoints_at_an_address_are_set_aside_beside_it(corpus: str, tmp_path: Path) -> None:
    address = f"memory://{tmp_path}/run"
    save(start(ALONE, at(address, corpus)))
    assert set_aside(address) == f"{address}.old-1"
    assert checkpoints(address) == []
    assert not [*faults(f"{address}.old-1/step-0")]


def test_an_address_that_nobody_knows_is_the_users_to_mend(corpus: str) -> None:
    with pytest.raises(UserError, match=r"nosuch://bucket/run cannot be reached: .*Give a folder"):
        checkpoints("nosuch://bucket/run")


def test_a_folder_that_the_system_refuses_is_the_users_to_mend() -> None:
    too_long = "x" * 300
    for ask in (
        lambda: checkpoints(too_long),
        lambda: storage(too_long).size("a"),
        lambda: read_manifest(too_long),
    ):
        with pytest.raises(UserError, match=r"x(/.*)? cannot be read: File name too long"):
            ask()
    with pytest.raises(UserError, match="x cannot be read: File name too long"):
        to_resume(resume_of(from_tables(job("text.txt", checkpoint={"resume": too_long}))))


def test_a_checkpoint_of_weights_only_starts_with_a_new_optimizer(corpus: str, tmp_path: Path) -> None:
    tables = job(corpus, run={"folder": str(tmp_path)})
    training = start(ALONE, tables)
    next(steps(training))
    held = Contents.open(save(training))
    only = tmp_path / "weights" / "step-7"
    manifest = Manifest(7, held.manifest.model, {}, {}, {}, {}, 1, "none", {})
    write_checkpoint(only, manifest, ((key, held.read(key)) for key in held.tensors if key.is_model))
    restore(training, str(only))
    assert training.step == 7
    state = training.optimizer.state
    assert state
    assert all(not bool(value.any()) for moments in state.values() for value in moments.values())
    assert all(
        torch.equal(value, held.read(StateKey.model(name))) for name, value in weights(training).items()
    )
