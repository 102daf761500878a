"""Seeds for a user's module: its random numbers, as of dropout, depend only on the place in the run and in
the model.

Before the forward of each micro-batch, and of each block in it, torch's generators are seeded from (the job's
seed, the number in the run of the micro-batch's first sequence, the block). Therefore

- a step draws the same numbers whether the run was resumed before it or not, on any number of workers;
- layouts of data, replica, pipeline and zero draw what one device draws, as long as micro-batches have the
  same size, because dropout draws once for a whole micro-batch;
- recomputation draws what forward drew: torch's checkpointing restores the state of the generators
  (parallel/recompute.py);
- each context device draws for its own tokens. Tensor devices all draw the same numbers, because some of what
  they hold is the same. Neither is what one device draws, and both are reproducible.

Seeding costs the host some microseconds per block. The transformer draws nothing and is not seeded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.models.draw import hashed
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement


class Seeds:
    """Seeds this device's generators, on the host and on the GPU, for each block of a micro-batch."""

    def __init__(self, seed: int, comm: Comm) -> None:
        self._seed, self._part, self._device = seed, comm.mesh.coordinate("context"), comm.device
        self._sequence = 0

    def begin(self, sequence: int) -> None:
        """Seed the generators for a micro-batch whose first sequence has this number in the run."""
        self._sequence = sequence
        self.seed_block("")

    def seed_block(self, block: str) -> None:
        """Seed the generators for this block of the micro-batch."""
        seed = hashed(f"{self._seed}:{self._sequence}:{self._part}:{block}") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)


class Seeded(Replacement):
    """A block that seeds the generators before each forward."""

    seeds_of_model: Seeds
    seeded_name: str
    """Number of the block in the model."""

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Seed the generators, and run the block's forward."""
        self.seeds_of_model.seed_block(self.seeded_name)
        output: Tensor = super().forward(*inputs, **named)
        return output

    def extra_repr(self) -> str:
        """Return the block's description, and what its random numbers depend on."""
        # Without the block's number, so that torch prints equal blocks once.
        return join_texts(super().extra_repr(), "random numbers seeded by micro-batch and block")


def seed_blocks(model: nn.Module, blocks: Mapping[str, nn.Module], seeds: Seeds) -> None:
    """Replace these blocks of the model by seeded ones; call this after compilation, so that the compiler
    does not see the seeding."""
    seeded = {
        block: replacement(block, Seeded, seeds_of_model=seeds, seeded_name=name)
        for name, block in blocks.items()
    }
    put_in_place(model, seeded)
