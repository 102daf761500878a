"""The names of a sharding table, for users' modules: `from shardwise.models.sharding import Sharding,
columns`.

plans/sharding.py, which needs no torch, defines and explains them.
"""

from shardwise.plans.sharding import (
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
