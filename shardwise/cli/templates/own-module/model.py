"""A transformer that is not part of shardwise, and the table that lets shardwise split it.

It is plain torch: pre-norm blocks with LayerNorm, learned positions, one matrix for queries, keys and values,
and GELU. Nothing in it knows about devices. Four points make it ready for them:

- no forward has a fixed number where devices share a dim: `unflatten(-1, (-1, ...))` finds the number of
  heads;
- queries, keys and values of one head lie together in `qkv`, so that a split by heads splits all three;
- attention itself is a module without weights, `Mixing`, where devices that share a sequence communicate;
- a pipeline stage has only some blocks, and None for modules of other stages, which `forward` skips.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import Model
from shardwise.models.sharding import Sharding, columns, gathered, positions, rows, vocabulary, whole


class Mixing(nn.Module):
    """Causal attention: each tensor is (batch, heads, sequence, head_dim)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention output, in the shape of the query."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


class Attention(nn.Module):
    """Multi-head attention with one input matrix."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden, 3 * config.heads * config.head_dim)
        self.mixing = Mixing()
        self.output = nn.Linear(config.heads * config.head_dim, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        # (batch, heads, sequence, 3 * head_dim)
        per_head = self.qkv(x).unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2)
        query, key, value = per_head.chunk(3, -1)
        mixed = self.mixing(query, key, value, None)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then two layers with a GELU between them."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.before_layers = nn.LayerNorm(config.hidden)
        self.layers = nn.Sequential(
            nn.Linear(config.hidden, config.ffn), nn.GELU(), nn.Linear(config.ffn, config.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        x = x + self.attention(self.before_attention(x))
        result: Tensor = x + self.layers(self.before_layers(x))
        return result


class OwnModel(nn.Module):
    """A language model: it maps token ids to a summed loss, or to logits."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.places = nn.Embedding(config.max_positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Sequential(nn.Linear(config.hidden, config.vocabulary, bias=False))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.sharding = Sharding(
            modules={
                "embedding": vocabulary(),
                "places": positions(),
                "blocks.*.before_*": whole(),
                "blocks.*.attention": gathered(),
                "blocks.*.attention.qkv": columns(config.heads),
                "blocks.*.attention.output": rows(config.heads),
                "blocks.*.layers": gathered(),
                "blocks.*.layers.0": columns(),
                "blocks.*.layers.2": rows(),
                "norm": whole(),
                "head": gathered(),
                "head.0": columns(gather=True),
            },
            blocks="blocks",
            first=("embedding", "places"),
            last=("norm", "head"),
            mixing="blocks.*.attention.mixing",
        )

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return the loss summed over targets, or the logits. A pipeline stage that is not the last returns
        the hidden states."""
        x = inputs
        if self.embedding is not None:
            if positions is None:
                positions = torch.arange(inputs.shape[1], device=inputs.device)
            x = self.embedding(inputs) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
