"""Names of the spans of a step (observe/clock.py measures them)."""

from __future__ import annotations

from typing import Literal, get_args

Span = Literal["data", "forward_backward", "exposed_communication", "optimizer"]
SPANS: tuple[Span, ...] = get_args(Span)
"""Spans of every step, in the order in which they are shown."""
EXPOSED: Span = "exposed_communication"
"""Span of waits for communication."""
