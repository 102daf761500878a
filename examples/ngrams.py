"""A sparse model that predicts the next byte from the n-grams of the last 1 to 4 bytes.

Each n-gram is hashed to a row of logits in a large table, and the rows are summed. A batch uses as many rows
as it has n-grams, of a table that may have millions, and with `sparse=True` the gradient has only these rows.
Lock-free updates are made for such gradients (docs/asynchronous.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import Model

LONGEST = 4


class NGrams(nn.Module):
    """Maps token ids to a summed loss, or to logits. The table has `hidden` rows."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(config.hidden, config.vocabulary, mode="sum", sparse=True)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the summed loss of ids (batch, sequence), or their logits if there are no targets."""
        rows = hashed(inputs, self.table.num_embeddings)  # (batch, sequence, LONGEST)
        logits: Tensor = self.table(rows.flatten(0, 1))  # (batch x sequence, vocabulary)
        if targets is None:
            return logits.unflatten(0, inputs.shape)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


def hashed(inputs: Tensor, rows: int) -> Tensor:
    """Return the table row of each n-gram that ends at each id: (batch, sequence, LONGEST)."""
    table_rows, ngram = [], torch.zeros_like(inputs)
    for back in range(LONGEST):
        ngram = ngram * 1_000_003 + F.pad(inputs, (back, 0))[:, : inputs.shape[1]] + 1
        table_rows.append((ngram ^ (ngram >> 17)) * 2_654_435_761 % rows)
    return torch.stack(table_rows, -1)
