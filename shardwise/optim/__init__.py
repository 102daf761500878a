"""Optimizers, schedules, loss scaling, global clipping."""

from shardwise.optim.adamw import make_optimizer, update
from shardwise.optim.norm import first_non_finite, global_norm, local, sharded_axes
from shardwise.optim.onebit import OneBitAdam
from shardwise.optim.scaling import LossScale
from shardwise.optim.schedule import learning_rate, turns

__all__ = [
    "LossScale",
    "OneBitAdam",
    "first_non_finite",
    "global_norm",
    "learning_rate",
    "local",
    "make_optimizer",
    "sharded_axes",
    "turns",
    "update",
]
