"""One decoder-only transformer that is Llama 3, Qwen 2 or 3, Mistral, Gemma 2 or GPT-2/3, as its
configuration says.

    tokens → embedding (+ learned positions) → blocks → norm → head → loss
    block:   x + attention(norm(x)),  then  x + feed_forward(norm(x))
             (with post norms: x + norm(attention(norm(x))), …)

The families differ only in a few choices: RMSNorm or LayerNorm, rotary or learned positions, how many heads
share a key, how far back a token sees, a norm over queries and keys, SwiGLU or GELU, biases, a separate head
or the embedding as the head. It is a plain module of full size, which knows no ranks. It can be built without
memory for its weights (models/unallocated.py), parallelised, materialised with `to_empty`, and then given its
values (models/initialise.py).

Everything that needs a parameter happens inside `forward`, the loss and the logits for sampling too, because
the wrappers of data parallelism (DDP's gradient hooks, FSDP2's gathering of sharded weights) act around
`forward` and nowhere else. With targets it returns the summed loss and the full logits never exist
(models/loss.py).

Mixed precision: embeddings give vectors in their `compute_dtype`; every later layer follows its input
(models/layers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.config.model import Model
from shardwise.models.attention import Attention, AttentionMask
from shardwise.models.experts import MixtureOfExperts
from shardwise.models.float8_products import Float8Product
from shardwise.models.layers import Embedding, make_feed_forward, make_norm
from shardwise.models.loss import cap_logits, linear_cross_entropy
from shardwise.models.products import linear
from shardwise.models.rotary import Angles, Rotary
from shardwise.plans.sharding import Sharding, transformer_sharding


class Block(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream: the unit that is compiled
    and sharded."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        window = config.window_of(layer)
        self.windowed = window is not None
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, window)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = MixtureOfExperts(config) if config.experts else make_feed_forward(config)
        self.attention_post_norm = make_norm(config) if config.post_norms else nn.Identity()
        self.feed_forward_post_norm = make_norm(config) if config.post_norms else nn.Identity()

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        """Return the new residual stream: (batch, sequence, hidden), as the input."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), angles, mask))
        result: Tensor = x + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x)))
        return result


class Head(nn.Module):
    """Computes the logits of every token of the vocabulary, or the loss."""

    def __init__(self, weight: Tensor, softcap: float | None = None) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.softcap = softcap
        """Bound of the logits' magnitudes; None: they have none."""
        self.compiled = False
        """Whether the elementwise part of the loss is compiled, which pays on GPUs."""
        self.split_backward = False
        """Whether backward may run in two halves, as in zero-bubble pipelines."""
        self.chunk: int | None = None
        """Number of tokens whose logits exist at once; None: as many as the budget allows
        (plans/chunks.py)."""
        self.float8: Float8Product | None = None
        """Its products in 8 bits; None: they are made in the dtype of the hidden states."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, at: int | None = None) -> Tensor:
        """Return the loss of hidden states (batch, sequence, hidden), summed over targets; without targets
        the logits at all positions, or at the position `at`."""
        if targets is not None:
            return linear_cross_entropy(
                hidden.flatten(0, 1),
                self.weight,
                targets.flatten(),
                self.chunk,
                compiled=self.compiled,
                split_backward=self.split_backward,
                softcap=self.softcap,
                float8=self.float8,
            )
        chosen = hidden if at is None else hidden[:, at]
        return cap_logits(linear(chosen, self.weight.to(hidden.dtype)), self.softcap)


class Transformer(nn.Module):
    """The whole model, from token ids to a summed loss or to logits.

    It can be cut into pipeline stages: a stage lacks some blocks, and the modules that it lacks before or
    after them are None. Its inputs are then hidden states of the previous stage, or its outputs are hidden
    states for the next.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embedding: Embedding | None = Embedding(config.vocabulary, config.hidden)
        self.positions = (
            Embedding(config.max_positions, config.hidden) if config.positions == "learned" else None
        )
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.mask = AttentionMask()
        self.window_mask = None if config.window is None else AttentionMask(config.window)
        self.blocks: nn.Module = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm: nn.Module | None = make_norm(config)
        shape = config.vocabulary, config.hidden
        weight = self.embedding.weight if config.tied else nn.Parameter(torch.empty(shape))
        self.head: Head | None = Head(weight, config.logit_softcap)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        logits_at: int | None = None,
    ) -> Tensor:
        """Return the loss of token ids (batch, sequence), summed over the targets that are not -100.

        Without targets it returns the logits at every position, or (batch, vocabulary) at the position
        `logits_at`. A stage without the head returns hidden states.

        `documents` (batch, sequence) says where the document of each token begins; a token then sees only its
        document, and learned positions count from there. `positions` are the tokens' positions, where
        `inputs` are not the whole sequence. Rotary positions count on through documents: attention inside a
        document depends only on their differences.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = inputs
        if self.embedding is not None:
            x = self._embed(inputs, positions if documents is None else positions - documents)
        angles = None if self.rotary is None else self.rotary(positions, x.dtype)
        mask = self.mask(documents, positions)
        in_window = mask if self.window_mask is None else self.window_mask(documents, positions)
        for block in self.blocks.children():
            x = block(x, angles, in_window if block.windowed else mask)
        if self.norm is None or self.head is None:
            return x
        result: Tensor = self.head(self.norm(x), targets, logits_at)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Apply `fn` as `to` and `to_empty` do. torch would make two weights of a tied one whose device
        changes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head._parameters["weight"] = self.embedding._parameters["weight"]
        return self

    def _embed(self, inputs: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        x: Tensor = self.embedding(inputs)
        if self.config.scaled_embedding:
            x = x * math.sqrt(self.config.hidden)
        return x if self.positions is None else x + self.positions(positions)

    @property
    def sharding(self) -> Sharding:
        """The table that says how the model may be split over devices."""
        return transformer_sharding(self.config)
