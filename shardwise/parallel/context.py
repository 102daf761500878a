"""Context parallelism: several devices share one sequence.

Everything except attention computes one token at a time, so a device simply gets fewer tokens: inputs,
targets and document numbers are cut along the sequence, and rotary or learned embeddings get the positions of
these tokens. Only attention mixes tokens; its modules, named `mixing` in the sharding table, are replaced:

| layout.attention | tokens of a device        | values sent per layer, forward                            |
| ---------------- | ------------------------- | --------------------------------------------------------- |
| ring             | an early and a late chunk | keys and values once around: 2 E g (context - 1)          |
| ulysses          | one chunk                 | all-to-all of queries, keys, values, results: E (2 + 2 g) |

Here E is the number of values in a device's queries, and g = kv_heads / heads.

The ring (Liu et al. 2023) overlaps its messages with the blocks it computes and works with any number of
heads; Ulysses (Jacobs et al. 2023) runs the fused kernel on the whole sequence for its share of the heads.
`auto` takes Ulysses where query heads and key heads divide over the devices, the ring elsewhere. Only Ulysses
supports sliding windows and capped scores.

Weights are the same on all context devices and their gradients are sums over tokens, so for everything else a
context device is one more data-parallel device: states are sharded over data x context.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.config.layout_rules import context_attention
from shardwise.config.model import Model
from shardwise.errors import UserError
from shardwise.models import Sharding, matches
from shardwise.models.attention import AttentionMask, CausalAttention
from shardwise.models.replace import put_in_place
from shardwise.parallel.modules import ParallelModule, Share, parallel_module
from shardwise.parallel.ring import ring_attention, zigzag_positions
from shardwise.parallel.ulysses import contiguous_positions, ulysses_attention

AXIS = "context"


def split_over_context(model: nn.Module, table: Sharding, comm: Comm, config: Model) -> nn.Module:
    """Return the model with modules that attend over the tokens of all context devices."""
    attention = Ring if context_attention(config, comm.mesh.layout) == "ring" else Ulysses
    mixing = [module for path, module in model.named_modules() if matches(table.mixing, path)]
    if not mixing:
        raise UserError(
            "layout.context: the model's sharding table names no modules as `mixing`, so a sequence cannot "
            "be split"
        )
    share = Share.of(comm, AXIS)
    split = {module: parallel_module(module, attention, share) for module in mixing}
    for path, module in model.named_modules():
        if matches(table.mask, path) or isinstance(module, AttentionMask):
            split[module] = parallel_module(module, Unused, share)
    return put_in_place(model, split)


def local_positions(model: Model, comm: Comm, length: int) -> Tensor:
    """Return the positions of this device's tokens in a sequence of this length."""
    mesh = comm.mesh
    positions = zigzag_positions if context_attention(model, mesh.layout) == "ring" else contiguous_positions
    return positions(length, mesh.size(AXIS), mesh.coordinate(AXIS)).to(comm.device)


class Ring(ParallelModule):
    """Attention in which queries stay, and keys and values pass by (parallel/ring.py)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """Return the result of attention; queries, keys and values are (batch, heads, this device's tokens,
        head_dim), documents (batch, this device's tokens)."""
        return ring_attention(query, key, value, self.parallel_share.comm, documents)

    def describe_share(self) -> str:
        """Return which tensors are communicated."""
        return "keys and values passed around the ring"


class Ulysses(ParallelModule):
    """Attention in which each device computes some heads for all tokens (parallel/ulysses.py)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """Return the result of attention; shapes are those of `Ring.forward`."""
        window, softcap = (self.window, self.softcap) if isinstance(self, CausalAttention) else (None, None)
        return ulysses_attention(query, key, value, self.parallel_share.comm, documents, window, softcap)

    def describe_share(self) -> str:
        """Return which tensors are communicated."""
        return "tokens exchanged for heads, and back"


class Unused(ParallelModule):
    """Takes the place of the mask: attention itself compares the document numbers of the tokens that meet."""

    def forward(self, documents: Tensor | None, *unused: Tensor) -> Tensor | None:
        """Return the document numbers as they are."""
        return documents

    def describe_share(self) -> str:
        """Return what happens to the document numbers."""
        return "document numbers handed on to attention"
