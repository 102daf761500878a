"""Writes, for a few jobs, which rank holds which slice of which parameter: `python
tests/parallel/placements/write.py [FOLDER [JOB ...]]`.

The parallel model of every rank is built as in a run, but without memory for its weights and without peers,
on torch's fake process group. Each rank is a fork of this process, because torch remembers the places of
tensors from one mesh to the next.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.comm import Comm
from shardwise.config import Config, from_tables
from shardwise.config.parameters import parameter_shapes
from shardwise.mesh import Worker, join
from shardwise.optim import local
from shardwise.parallel import parallelise
from shardwise.parallel.holdings import Slices, describe, rank_slices
from shardwise.plans import Plan, choose

HERE = Path(__file__).parent
TRAIN = {"global_batch": 48, "micro_batch": 1}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe-tiny-all-axes": (
        {"preset": "moe-tiny"},
        {"pipeline": 2, "data": 2, "context": 2, "tensor": 2, "expert": 2, "zero": 3},
    ),
    "gpt2-tied": ({"preset": "gpt2"}, {"pipeline": 2, "data": 2, "tensor": 2, "zero": 0}),
    "llama3-8b-zero-3": ({"preset": "llama3-8b"}, {"data": 8, "zero": 3}),
    "llama3-70b-interleaved": (
        {"preset": "llama3-70b", "layers": 8},  # of 80, which differ in nothing but their number
        {"pipeline": 2, "data": 1, "tensor": 8, "schedule": "interleaved"},
    ),
    "uneven-vocabulary": (
        {"preset": "bytes-400k", "vocabulary": 259, "ffn": 333},
        {"replica": 2, "data": 3, "tensor": 2, "zero": 3},
    ),
    "fewer-kv-heads": (
        {"preset": "bytes-2m", "heads": 8, "head_dim": 24, "kv_heads": 2},
        {"data": 2, "tensor": 4, "zero": 3},
    ),
}


def main(folder: Path, names: list[str]) -> None:
    for name in names or JOBS:
        model, layout = JOBS[name]
        config = from_tables(
            {
                "model": model,
                "layout": layout,
                "train": TRAIN,
                "data": {"source": "none", "sequence_length": 256},
            }
        )
        lines = [f"{_words(model)} on {_words(layout)}", "", *table(config)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def table(config: Config) -> list[str]:
    plan = choose(config, config.layout.world)
    holdings = dict(enumerate(slices_of_ranks(config, plan)))
    return describe(holdings, parameter_shapes(config.model))


def _words(table: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items())


def slices_of_ranks(config: Config, plan: Plan) -> Iterator[dict[str, Slices]]:
    """Two at a time: as many as the smallest machine has cores."""
    ranks = range(plan.layout.world)
    for pair in (ranks[start : start + 2] for start in ranks[::2]):
        for process, pipe in [_fork(config, plan, rank) for rank in pair]:
            with os.fdopen(pipe, "rb") as file:
                answer = file.read()
            assert os.waitpid(process, 0)[1] == 0, "a rank failed; its error is above"
            yield {
                name: tuple(slice(*bounds) for bounds in parts)
                for name, parts in pickle.loads(answer).items()
            }


def _fork(config: Config, plan: Plan, rank: int) -> tuple[int, int]:
    reading, writing = os.pipe()
    if process := os.fork():
        os.close(writing)
        return process, reading
    status = 1
    try:
        own = {
            name: [(part.start, part.stop) for part in parts]
            for name, parts in build(config, plan, rank).items()
        }
        with os.fdopen(writing, "wb") as file:
            file.write(pickle.dumps(own))
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def build(config: Config, plan: Plan, rank: int) -> dict[str, Slices]:
    world = plan.layout.world
    worker = Worker(
        rank=rank, world=world, local_rank=0, local_world=world, address="", port=0, launcher="test"
    )

    def meet(*_: Any) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    with (
        patch("shardwise.mesh.mesh._meet", meet),
        patch("shardwise.parallel.apply.allocate"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        parallel = parallelise(plan, Comm(join(worker, plan.layout)))
    own = rank_slices(parallel)
    for name, parameter in parallel.named_parameters():
        lengths = tuple(part.stop - part.start for part in own[name])
        assert lengths == tuple(local(parameter).shape), (
            f"{name}: torch holds {tuple(local(parameter).shape)} on rank {rank}"
        )
    return own


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, sys.argv[2:])
