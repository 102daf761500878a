"""Updates of sharded weights, loss scaling and the global norm of gradients."""

from shardwise.optim.loss_scaling import LossScale
from shardwise.optim.norm import first_non_finite, global_norm, local, sharded_axes
from shardwise.optim.sharded import ShardedOptimizer, make_optimizer
from shardwise.optim.update import update

__all__ = [
    "LossScale",
    "ShardedOptimizer",
    "first_non_finite",
    "global_norm",
    "local",
    "make_optimizer",
    "sharded_axes",
    "update",
]
