"""Context parallelism: several devices share one sequence.

Everything but attention looks at one token at a time, so a device simply gets fewer tokens: inputs, targets and document
numbers are cut along the sequence, and rotary or learned positions are told which places they are. Attention alone mixes
tokens; its modules, named `mixing` in the sharding table, are given another way to compute:

| layout.attention | tokens of a device        | moves a layer, forward (E values of queries, g = kv_heads / heads)        |
| ---------------- | ------------------------- | ------------------------------------------------------------------------- |
| ring             | an early and a late chunk | keys and values once around: 2 E g (context - 1)                          |
| ulysses          | one chunk                 | all-to-all of queries, keys, values and results: E (2 + 2 g)              |

The ring (Liu et al. 2023) overlaps its messages with the blocks it computes and works with any number of heads; Ulysses (Jacobs
et al. 2023) runs the fused kernel on the whole sequence for its share of the heads. `auto` takes Ulysses where query heads and
key heads divide over the devices, the ring elsewhere.

Weights are the same on all context devices and their gradients are sums over tokens, so for everything else a context device
is one more data-parallel device: states are sharded over data x context.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.config import Model, context_attention
from shardwise.errors import UserError
from shardwise.models import Sharding, matches
from shardwise.parallel.ring import ring_attention, zigzag_places
from shardwise.parallel.ulysses import contiguous_places, ulysses_attention

Attend = Callable[[Tensor, Tensor, Tensor, Comm, Tensor | None], Tensor]
AXIS = "context"


def split_over_context(model: nn.Module, table: Sharding, comm: Comm, config: Model) -> None:
    """Give the modules that mix tokens a way to do so over devices."""
    kind = context_attention(config, comm.mesh.layout)
    attend: Attend = ring_attention if kind == "ring" else ulysses_attention
    mixing = [module for path, module in model.named_modules() if matches(table.mixing, path)]
    if not mixing:
        raise UserError("layout.context: the model's sharding table names no modules as `mixing`, so a sequence cannot be split")
    for module in mixing:
        module.forward = _mixing(attend, comm)
    for path, module in model.named_modules():
        if matches(table.mask, path):
            module.forward = _documents  # which tokens may meet is worked out where they do


def places(model: Model, comm: Comm, length: int) -> Tensor:
    """The places in a sequence of this length of the tokens that are this device's."""
    mesh = comm.mesh
    choose = zigzag_places if context_attention(model, mesh.layout) == "ring" else contiguous_places
    return choose(length, mesh.size(AXIS), mesh.coordinate(AXIS)).to(comm.device)


def _documents(documents: Tensor) -> Tensor:
    return documents


def _mixing(attend: Attend, comm: Comm) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    def forward(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        return attend(query, key, value, comm, documents)

    return forward
