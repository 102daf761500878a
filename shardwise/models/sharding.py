"""The names of a sharding table, for users' modules: `from shardwise.models.sharding import Sharding,
columns`.

plan/sharding.py, which needs no torch, defines and explains them.
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
