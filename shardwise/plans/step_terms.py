"""The terms of a step's time, which the planner predicts and a report compares."""

from __future__ import annotations

from typing import Literal, get_args

Term = Literal[
    "matmul", "attention", "elementwise", "launch", "recompute", "optimizer", "tensor", "context", "expert",
    "data", "replica", "imbalance", "bubble", "pipeline_sends", "links", "offload",
]  # fmt: skip
TERMS: tuple[str, ...] = get_args(Term)
COMPUTING = ("matmul", "attention", "elementwise", "launch", "recompute")
COMMUNICATION = ("tensor", "context", "expert", "data", "replica", "pipeline_sends", "links")
"""Terms of communication that no computation hides."""
IDLE = ("imbalance", "bubble")
"""Terms of waiting for devices that have more work."""
