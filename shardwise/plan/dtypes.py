"""Which dtype each number has, by name (config/dtype_names.py).

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

Runtime and cost model read this table; `models/torch_dtypes.py` turns a name into torch's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Train
from shardwise.config.dtype_names import BYTES
from shardwise.plan.engine import Engine


def wide(dtype: str) -> str:
    """The dtype in which numbers of this dtype are summed, so that small ones are not rounded away."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Dtypes:
    """The dtype of each kind of number of a run, by name."""

    compute: str
    """Activations, and the weights that they meet. Products in float8 are between values in bfloat16, or in
    float64 where weights are: so a proof of them has no other rounding than theirs."""
    states: str
    """Weights and optimizer states between steps."""
    sums: str
    """Gradients that FSDP2 sums, over micro-batches and over devices."""

    @classmethod
    def of(cls, train: Train) -> Dtypes:
        """Return the dtypes of a job."""
        compute = train.precision
        if compute == "float8":
            compute = "float64" if train.state_dtype == "float64" else "bfloat16"
        states = wide(compute) if train.state_dtype == "auto" else train.state_dtype
        return cls(compute, states, wide(compute))

    def summed_by(self, engine: Engine) -> str:
        """Return the dtype in which gradients are summed over devices: DDP sums them as they are stored."""
        return self.sums if engine.sharded else self.states


def computes_wide(parameter: str) -> bool:
    """Whether the weight of this name is computed with in the wide dtype, whatever the precision. FSDP2
    gathers all weights of a unit in one dtype, so such a weight is a unit by itself."""
    return ".router." in parameter


def value_bytes(precision: str) -> int:
    """Bytes of an activation; products in float8 or less leave what lies between them as in bfloat16."""
    return BYTES.get(precision, BYTES["bfloat16"])
