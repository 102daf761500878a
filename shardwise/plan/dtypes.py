"""Which dtype each number has, by name (config/dtypes.py).

| number                                   | dtype                                                        |
| ---------------------------------------- | ------------------------------------------------------------ |
| activations, and weights in computation  | `train.precision`; bfloat16 around products in float8        |
| weights and moments between steps        | `train.state_dtype`; where that is "auto", the wide dtype of |
|                                          | the precision                                                |
| sums (losses, statistics, norms, scores) | the wide dtype of what is summed: float32, or float64 for    |
|                                          | float64                                                      |
| routers of experts, in computation       | the wide dtype of the precision: a rounded score would send  |
|                                          | tokens to another expert                                     |
| gradients on their way through FSDP2     | the wide dtype of the precision                              |

Runtime and cost model read this table; `models/dtypes.py` turns a name into torch's own dtype.
"""

from __future__ import annotations

from shardwise.config import Train
from shardwise.config.dtypes import BYTES


def wide(dtype: str) -> str:
    """The dtype in which numbers of this dtype are summed, so that small ones are not rounded away."""
    return "float64" if dtype == "float64" else "float32"


def compute_dtype(train: Train) -> str:
    """The dtype of activations and of the weights they meet. Products in float8 are between values in
    bfloat16, or in float64 where weights are: so a proof of them has no other rounding than theirs."""
    if train.precision == "float8":
        return "float64" if train.state_dtype == "float64" else "bfloat16"
    return train.precision


def state_dtype(train: Train) -> str:
    """The dtype weights and optimizer state are stored in."""
    return wide(compute_dtype(train)) if train.state_dtype == "auto" else train.state_dtype


def reduce_dtype(train: Train) -> str:
    """The dtype FSDP2 sums gradients in, over micro-batches and over devices."""
    return wide(compute_dtype(train))


def computes_wide(parameter: str) -> bool:
    """Whether the weight of this name is computed with in the wide dtype, whatever the precision. FSDP2
    gathers all weights of a unit in one dtype, so such a weight is a unit by itself."""
    return ".router." in parameter


def value_bytes(precision: str) -> int:
    """Bytes of an activation; products in float8 or less leave what lies between them as in bfloat16."""
    return BYTES.get(precision, BYTES["bfloat16"])
