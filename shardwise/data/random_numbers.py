"""Random numbers that the code of a program draws from the generators of a process: torch's, numpy's and
Python's.

A generator has one state for a whole process. What a program draws from it therefore depends on all that was
drawn before in the same process, and workers are processes of different ages: after a fault, new ones train
together with those that survived. So all generators are seeded, from numbers that are the same on all
workers: from the job's seed before the program is called, and from the place of a sample in the run before
the sample is read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardwise.models.draw import hashed


def seed_process(seed: int) -> None:
    """Seed all generators of this process, those of its GPUs too."""
    torch.manual_seed(seed)
    _seed_others(seed)


def seed_sample(seed: int, number: int, use: str = "") -> None:
    """Seed the generators of this process, without those of GPUs, for the sample with this number. Different
    texts as `use` give different random numbers."""
    mixed = hashed(f"{seed}:{number}:{use}")
    torch.default_generator.manual_seed(mixed >> 1)
    _seed_others(mixed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def generators_restored(gpus: bool = False) -> Iterator[None]:
    """Restore the states of this process's generators at the end, with `gpus` those of GPUs too."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if gpus and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
