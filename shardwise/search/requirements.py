"""Compute the bandwidth at which communication costs no time.

Communication that runs at the same time as computing costs only the time by which it is longer. In a ring
each device sends `wire` bytes in `hops` messages, so hiding behind T seconds needs

    wire / bandwidth + hops x latency <= T

which gives the least bandwidth for a latency. Bandwidth is that of one device, in one direction.
"""

from __future__ import annotations

from math import inf

import numpy as np

from shardwise.cost.collectives import wire_factor

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def wire_bytes(kind: str, size: float, members: int) -> float:
    """Return the bytes that each device sends for a collective on a tensor of `size` bytes in all (for
    all_to_all, in one device's buffer)."""
    return size * float(wire_factor(kind, np.asarray(float(members))))


def ring_hops(kind: str, members: int) -> int:
    """Return the number of messages in a row that a collective takes; 1 for a send or a pipelined
    broadcast."""
    return _ROUNDS[kind] * (members - 1) if kind in _ROUNDS else min(members - 1, 1)


def least_bandwidth(wire: float, seconds: float, hops: float = 0.0, latency: float = 0.0) -> float:
    """Return the bytes/s at which `wire` bytes in this many hops take no longer than `seconds` of computing;
    infinite if the latency alone takes as long."""
    left = seconds - hops * latency
    return wire / left if left > 0 else inf
