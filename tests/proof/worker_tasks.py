"""What test_workers.py has its workers do."""

from __future__ import annotations

import time
from typing import Any

import torch

from shardwise.errors import UserError
from shardwise.mesh import Worker


def introduce(worker: Worker, word: str) -> tuple[str, int, int, int, bool]:
    return word, worker.rank, worker.world, torch.get_num_threads(), torch.cuda.is_initialized()


def wait_in_vain(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(1000)


def mistake(worker: Worker) -> Any:
    if worker.rank == 1:
        raise UserError("write something else")
    time.sleep(1000)
