"""The terms that the seconds of a step are made of: the planner predicts them, a report compares them."""

from __future__ import annotations

from typing import Literal, get_args

Term = Literal[
    "matmul", "attention", "elementwise", "launch", "recompute", "optimizer", "tensor", "context", "expert",
    "data", "replica", "imbalance", "bubble", "pipeline_sends", "links", "offload",
]  # fmt: skip
TERMS: tuple[str, ...] = get_args(Term)
COMPUTING = ("matmul", "attention", "elementwise", "launch", "recompute")
COMMUNICATION = ("tensor", "context", "expert", "data", "replica", "pipeline_sends", "links")
"""Communication that no computation hides."""
IDLE = ("imbalance", "bubble")
"""Waiting for devices that have more to do."""
