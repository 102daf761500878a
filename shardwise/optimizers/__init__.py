"""The optimizers of a job, one file each: settings, update, cost and refusals. Imported without torch."""

from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.base import Optimizer, RoundingKernel, SummedMomentum
from shardwise.optimizers.lion import Lion
from shardwise.optimizers.onebit_adam import OneBitAdam
from shardwise.optimizers.registry import BUILT_IN, DEFAULT, GROUP, find, from_table, kind_of, names
from shardwise.optimizers.sgd import SGD
from shardwise.optimizers.torch_class import TorchClass, address_of

__all__ = [
    "BUILT_IN",
    "DEFAULT",
    "GROUP",
    "SGD",
    "AdamW",
    "Lion",
    "OneBitAdam",
    "Optimizer",
    "RoundingKernel",
    "SummedMomentum",
    "TorchClass",
    "address_of",
    "find",
    "from_table",
    "kind_of",
    "names",
]
