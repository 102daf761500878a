"""Delay collectives on a GPU at random, so that a missing wait shows.

A collective runs on a stream of its own. Code that does not wait for it usually finds the right values all
the same, because the collective is quicker than what comes after it. Here the stream that a collective
takes its inputs from pauses for a random time before each, so that results come late and ranks drift apart.
"""

from __future__ import annotations

import random
from typing import Any

from shardwise._torch import DispatchMode, Operator, delay_stream
from shardwise.proof.sum_dtypes import call_operator


class DelayedCollectives(DispatchMode):
    """Delays every collective of torch by up to `longest` seconds while it is active."""

    def __init__(self, longest: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._longest = longest

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func.namespace == "c10d":
            delay_stream(random.uniform(0.0, self._longest))
        return call_operator(self, func, args, kwargs or {})
