"""One decoder-only transformer that is Llama 3, Qwen 3 or GPT-2/3, as its configuration says.

    tokens → embedding (+ learned positions) → blocks → norm → head → loss
    block:   x + attention(norm(x)),  then  x + feed_forward(norm(x))

The families differ in a few choices and nothing else: RMSNorm or LayerNorm, rotary or learned positions, how many heads
share a key, a norm over queries and keys, SwiGLU or GELU, biases, a head of its own or the embedding again. A plain module,
full-size: it knows no ranks. It can be built under `torch.device("meta")`, parallelised, materialised with `to_empty`, and
then given its values (models/initialise.py).

Everything that needs a parameter happens inside `forward`, the loss and the logits for sampling too, because the wrappers of
data parallelism (DDP's gradient hooks, FSDP2's gathering of sharded weights) act around `forward` and nowhere else. With
targets it returns the summed loss and the full logits never exist (models/loss.py).

Mixed precision: the embedding's output is cast to `compute_dtype`; every later layer follows its input (models/layers.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.config import Model
from shardwise.models.attention import Attention, document_mask
from shardwise.models.layers import Linear, make_feed_forward, make_norm
from shardwise.models.loss import linear_cross_entropy
from shardwise.models.rotary import Angles, Rotary


class Block(nn.Module):
    """Attention, then feed-forward, each on a normed copy of the residual stream: the unit that is compiled and sharded."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config)

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x), angles, mask)
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Transformer(nn.Module):
    """The whole model, from token ids to hidden states, a summed loss, or the next token's logits."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        """dtype of the activations; None: that of the weights."""
        self.compiled_loss = False
        """compile the elementwise part of the loss; worth it on GPUs."""
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.positions == "learned" else None
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = None if config.tied else Linear(config.hidden, config.vocabulary, bias=False)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None, last_logits: bool = False
    ) -> Tensor:
        """Hidden states (batch, sequence, hidden) of token ids (batch, sequence); or, with `targets`, the loss summed over
        the targets that are not -100; or, with `last_logits`, the logits (batch, vocabulary) after the last token.

        `documents` numbers the document of each token; a token then looks only at its own. Positions keep counting through
        the row, which rotary attention cannot notice.
        """
        hidden = self._hidden(inputs, documents)
        if targets is not None:
            flat = hidden.flatten(0, 1)
            return linear_cross_entropy(flat, self._head_weight(), targets.flatten(), compiled=self.compiled_loss)
        return self.logits(hidden[:, -1]) if last_logits else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary; for a few positions, not for training."""
        return nn.functional.linear(hidden, self._head_weight().to(hidden.dtype))

    def fill_buffers(self) -> None:
        """Give the buffers their values; needed after `to_empty` and after any cast of the whole model."""
        if self.rotary is not None:
            self.rotary.fill_buffers()

    def _hidden(self, inputs: Tensor, documents: Tensor | None) -> Tensor:
        x = self._embed(inputs)
        angles = None if self.rotary is None else self.rotary(inputs.shape[1], x.dtype)
        mask = None if documents is None else document_mask(documents)
        for block in self.blocks:
            x = block(x, angles, mask)
        hidden: Tensor = self.norm(x)
        return hidden

    def _embed(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions.weight[: inputs.shape[1]]
        return x.to(self.compute_dtype or x.dtype)

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight
