"""The names of a sharding table, for users' own modules: `from shardwise.models.sharding import Sharding,
columns, rows`.

What they mean is said where they are defined, in plan/sharding.py, which needs no torch.
"""

from shardwise.plan.sharding import (
    Role,
    Sharding,
    columns,
    experts,
    gathered,
    loss,
    matches,
    positions,
    rows,
    vocabulary,
    whole,
)

__all__ = [
    "Role",
    "Sharding",
    "columns",
    "experts",
    "gathered",
    "loss",
    "matches",
    "positions",
    "rows",
    "vocabulary",
    "whole",
]
