"""What we decide: parameters, FLOPs and memory in closed form, and the layout they lead to. No torch."""

from shardwise.plan.choose import Plan, choose
from shardwise.plan.flops import FLOP_CONVENTION, flops_per_token
from shardwise.plan.memory import StateBytes, reduce_dtype, state_bytes, state_dtype
from shardwise.plan.parameters import count, parameter_shapes

__all__ = [
    "FLOP_CONVENTION",
    "Plan",
    "StateBytes",
    "choose",
    "count",
    "flops_per_token",
    "parameter_shapes",
    "reduce_dtype",
    "state_bytes",
    "state_dtype",
]
