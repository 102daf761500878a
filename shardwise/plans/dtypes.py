"""The dtype of each kind of tensor, by name (config/dtype_names.py).

| tensor                                   | dtype                                                        |
| ---------------------------------------- | ------------------------------------------------------------ |
| activations, and weights in computation  | `train.precision`; bfloat16 around products in float8        |
| weights and moments between steps        | `train.state_dtype`; where that is "auto", the wide dtype of |
|                                          | the precision                                                |
| sums (losses, statistics, norms, scores) | the wide dtype of what is summed: float32, or float64 for    |
|                                          | float64                                                      |
| routers of experts, in computation       | the wide dtype of the precision: a rounded score would send  |
|                                          | tokens to another expert                                     |
| gradients on their way through FSDP2     | the wide dtype of the precision                              |

Runtime and cost model read this table; `models/torch_dtypes.py` turns a name into torch's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Train
from shardwise.config.dtype_names import BYTES
from shardwise.plans.engine import Engine


def wide(dtype: str) -> str:
    """Return the dtype in which values of this dtype are summed, so that small ones are not rounded away."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Dtypes:
    """The name of the dtype of each kind of tensor in a run."""

    compute: str
    """Dtype of activations, and of weights in computation. Around float8 products it is bfloat16; if weights
    are float64, it is float64, so that a proof sees only the rounding of float8."""
    states: str
    """Dtype of weights and optimizer states between steps."""
    sums: str
    """Dtype of gradients that FSDP2 sums over micro-batches and devices."""

    @classmethod
    def of(cls, train: Train) -> Dtypes:
        """Return the dtypes of a job."""
        compute = value_dtype(train.precision)
        if train.precision == "float8" and train.state_dtype == "float64":
            compute = "float64"
        states = wide(compute) if train.state_dtype == "auto" else train.state_dtype
        return cls(compute, states, wide(compute))

    def summed_by(self, engine: Engine) -> str:
        """Return the dtype in which gradients are summed over devices: DDP sums them as they are stored."""
        return self.sums if engine.sharded else self.states


def computes_wide(parameter: str) -> bool:
    """Return whether the weight of this name is used in the wide dtype in every precision.

    FSDP2 gathers all weights of a unit in one dtype, so such a weight is its own unit.
    """
    return ".router." in parameter


def value_dtype(precision: str) -> str:
    """Return the dtype of activations. Around products in 8 or 4 bits it is bfloat16."""
    return precision if precision in BYTES else "bfloat16"
