"""What a user's module draws, as dropout does, depends on where in the run and in the model it draws, and on
nothing else.

Before the forward of each micro-batch, and of each block in it, torch's generators are seeded from (the job's
seed, the number in the run of the micro-batch's first sequence, the block). Therefore

- a step draws the same whether the run was resumed before it or not, by however many workers;
- layouts of data, replica, pipeline and zero draw what one device draws, as long as micro-batches have the
  same size: dropout draws for a micro-batch at once, and other sequences beside a sequence are other numbers
  for it;
- recomputation draws what forward drew: torch's checkpointing puts back the state that the seed began
  (parallel/recompute.py);
- context devices draw each for its own tokens. Tensor devices draw alike, since some of what they hold is the
  same; so each part of a sequence that is split over them meets the same numbers. Neither is what one device
  draws, and both are reproducible.

Seeding costs the host some microseconds a block. The transformer draws nothing and is not seeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement


class Seeds:
    """Seeds this device's generators, on the host and on the GPU, through a micro-batch."""

    def __init__(self, seed: int, comm: Comm) -> None:
        self._seed, self._part, self._device = seed, comm.mesh.coordinate("context"), comm.device
        self._sequence = 0

    def begin(self, sequence: int) -> None:
        """A forward begins, of a micro-batch whose first sequence has this number in the run."""
        self._sequence = sequence
        self.plant("")

    def plant(self, block: str) -> None:
        """Seed the generators for this block of the micro-batch."""
        digest = hashlib.blake2b(
            f"{self._seed}:{self._sequence}:{self._part}:{block}".encode(), digest_size=8
        ).digest()
        seed = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)


class Seeded(Replacement):
    """A block whose every forward begins with a seed of its own."""

    seeds_of_model: Seeds
    seeded_name: str
    """The number of the block in the model."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The block's own, after the generators are seeded."""
        self.seeds_of_model.plant(self.seeded_name)
        return super().forward(*inputs, **named)

    def extra_repr(self) -> str:
        """What the block says of itself, and what its random numbers depend on."""
        # Without the block's number, so that torch prints equal blocks once.
        return join_texts(super().extra_repr(), "random numbers seeded by micro-batch and block")


def seed_blocks(model: nn.Module, blocks: Mapping[str, nn.Module], seeds: Seeds) -> None:
    """Replace these blocks of the model by ones that begin with a seed. This comes after compilation, so that
    the compiler does not see it."""
    put_in_place(
        model,
        {
            block: replacement(block, Seeded, seeds_of_model=seeds, seeded_name=name)
            for name, block in blocks.items()
        },
    )
