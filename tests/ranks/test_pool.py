from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks.jobs import FAMILIES, job, train
from ranks.pool import Pool, RankFailed

from shardwise.config import Layout
from shardwise.mesh import Worker, join


def add_ranks(worker: Worker, offset: int) -> tuple[int, int]:
    mesh = join(worker, Layout(data=worker.world))
    total = torch.tensor(worker.rank + offset)
    dist.all_reduce(total, group=mesh.group("data"))
    return int(total), os.getpid()


def one_raises(worker: Worker) -> None:
    join(worker, Layout(data=worker.world))
    if worker.rank == 1:
        raise ValueError("rank one cannot go on")
    dist.barrier()


def one_dies(worker: Worker) -> None:
    join(worker, Layout(data=worker.world))
    if worker.rank == 1:
        os._exit(3)
    dist.barrier()


def one_hangs(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(1000)


def threads(worker: Worker) -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def pool(ranks: Callable[[int], Pool]) -> Iterator[Pool]:
    """The session's pool of two, used again after each failure."""
    yield ranks(2)
    assert [total for total, _ in ranks(2).run(add_ranks, 10)] == [21, 21]


def test_cases_share_processes_but_not_process_groups(pool: Pool) -> None:
    first, second = pool.run(add_ranks, 0), pool.run(add_ranks, 5)
    assert [total for total, _ in (*first, *second)] == [1, 1, 11, 11]
    assert [process for _, process in first] == [process for _, process in second]


def test_a_rank_that_raises_fails_the_test_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r'(?s)rank 1:.*raise ValueError\("rank one cannot go on"\)'):
        pool.run(one_raises)


def test_a_rank_that_dies_fails_the_test(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="rank 1 did not answer"):
        pool.run(one_dies)


def test_a_hang_ends_after_its_time_and_shows_where(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 did not answer.*one_hangs"):
        pool.run(one_hangs, seconds=3)


def test_a_case_leaves_no_thread_of_its_groups_behind(pool: Pool, corpus: str) -> None:
    """Every group of gloo has threads; torch remembers meshes, and would keep those of every case."""
    layouts = [
        ("llama", {"data": 2, "zero": 3}),
        ("experts", {"data": 1, "tensor": 2, "expert": 2}),
        ("tied", {"data": 1, "pipeline": 2}),
    ]
    found = []
    for model, layout in layouts:
        pool.run(train, job(corpus, model=FAMILIES[model], train={"steps": 1}, layout=layout))
        found.append(pool.run(threads))
    assert max(max(counts) for counts in found) <= 4
