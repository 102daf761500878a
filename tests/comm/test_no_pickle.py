"""What arrives from the network is never unpickled: a pickle can run code, and torch cannot tell who sent
it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool
from torch.distributed import distributed_c10d

from shardwise.config import Layout
from shardwise.mesh import Worker
from shardwise.resilience.memory_snapshots import MemorySnapshots
from shardwise.train.build import keep_copy, recall, restore, save
from shardwise.train.evaluate import held_out_loss
from shardwise.train.guard import check_joined
from shardwise.train.run import _check_same_job
from shardwise.train.steps import steps

PACKAGE = Path(__file__).parents[2] / "shardwise"
LAYOUTS = {
    "pipeline, tensor, experts": {"pipeline": 2, "tensor": 2, "data": 1, "expert": 2},
    "pipeline in a V": {"pipeline": 2, "data": 1, "schedule": "zbv"},
    "context, zero 3": {"context": 2, "data": 2, "zero": 3},
    "data, zero 0": {"data": 2, "zero": 0},
}


def whole_life(worker: Worker, tables: Tables) -> int:
    """All that ranks of a run say to each other, with torch's only way from received bytes to an object
    closed."""

    def closed(*_: Any) -> Any:
        raise AssertionError("a pickle came over the network")

    opened, distributed_c10d._tensor_to_object = distributed_c10d._tensor_to_object, closed
    try:
        training, copies = start(worker, tables), MemorySnapshots(every=1)
        _check_same_job(training)
        recall(training, copies)
        check_joined(training)
        for _ in steps(training):
            keep_copy(training, copies)
        held_out_loss(training)
        folder = save(training, wait=True)
        assert recall(training, copies)
        restore(training, folder)
        return training.step
    finally:
        distributed_c10d._tensor_to_object = opened


FEW = ("pipeline in a V", "data, zero 0")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in FEW else pytest.mark.full) for name in LAYOUTS]
)
def test_a_run_saves_checks_copies_and_resumes_without_a_pickle(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, layout: str
) -> None:
    train = {"steps": 1, "global_batch": 4, "check_every": 1}
    sections = {
        "model": FAMILIES["experts"],
        "train": train,
        "layout": LAYOUTS[layout],
        "run": {"folder": str(tmp_path)},
    }
    world = Layout(**{"data": 1, **LAYOUTS[layout]}).world
    assert ranks(world).run(whole_life, job(corpus, **sections)) == [1] * world


def test_a_pickle_over_the_network_is_seen(ranks: Callable[[int], Pool]) -> None:
    with pytest.raises(AssertionError, match="a pickle came over the network"):
        ranks(2).run(_gather_objects)


def _gather_objects(worker: Worker) -> None:
    import torch.distributed as dist

    from shardwise.mesh import join

    def closed(*_: Any) -> Any:
        raise AssertionError("a pickle came over the network")

    join(worker, Layout(data=2))
    distributed_c10d._tensor_to_object = closed  # the rank is replaced after a failure
    dist.all_gather_object([None, None], 1)


PROGRAMS = ("library/program_address.py", "train/program_source.py")
"""A program of a notebook is written to a file of its user, and read by workers of the same user."""


def test_no_file_of_ours_unpickles_or_sends_objects() -> None:
    """Pipes between processes of one machine are multiprocessing's, and nobody else's."""
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)) in PROGRAMS:
            continue
        tree = ast.parse(path.read_text())
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        named |= {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        forbidden = {name for name in named if "pickle" in name or name.endswith(("_object", "_object_list"))}
        if str(path.relative_to(PACKAGE)) == "train/program_state.py":  # it writes, and loads weights only
            forbidden.discard("pickle")
            assert "weights_only=True" in path.read_text()
            assert not named & {"Unpickler", "loads"}
        assert not forbidden, f"{path} uses {forbidden}"
