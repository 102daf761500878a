"""The sharding table that a model declares, and the modules whose weight is looked up."""

from __future__ import annotations

from torch import nn

from shardwise.errors import UserError
from shardwise.models import Sharding
from shardwise.models.user_module import name_of

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weight is looked up, not multiplied by."""


def table_of(model: nn.Module) -> Sharding:
    """Return the sharding table of a model; an empty one where it has none."""
    table = getattr(model, "sharding", None)
    if table is None:
        return Sharding(modules={})
    if not isinstance(table, Sharding):
        raise UserError(
            f"{name_of(model)}.sharding is {type(table).__name__}; it must be a shardwise.models.Sharding"
        )
    return table
