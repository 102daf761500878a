"""What links must do for communication to cost nothing, and how far more devices can help at all.

Communication that runs beside computing costs only what is longer than the computing it hides behind. A ring moves from each
device `wire` bytes in `hops` messages, so hiding behind T seconds needs

    wire / bandwidth + hops x latency <= T

which gives the least bandwidth for a latency. Bandwidth is that of one device, in one direction.

Every function takes numbers or NumPy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.collectives import wire_factor

Array = NDArray[np.float64]
Values = float | Array

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


# -- links ---------------------------------------------------------------------------------------------------------------


def wire_bytes(kind: str, size: Values, members: Values) -> Values:
    """Bytes each device sends for a collective on a tensor of `size` bytes in all (for all_to_all, in one device's buffer)."""
    return size * wire_factor(kind, np.asarray(members, dtype=float))


def ring_hops(kind: str, members: Values) -> Values:
    """Messages in a row that a collective takes; one for a send or a pipelined broadcast."""
    return _ROUNDS[kind] * (members - 1) if kind in _ROUNDS else np.minimum(members - 1, 1.0)


def least_bandwidth(wire: Values, seconds: Values, hops: Values = 0.0, latency: Values = 0.0) -> Values:
    """Bytes/s at which `wire` bytes in so many hops take no longer than `seconds` of computing; infinite where the latency alone
    takes as long."""
    return _over(wire, seconds - hops * latency)


def _over(above: Values, below: Values) -> Values:
    """The quotient, infinite where there is nothing to divide by."""
    some = np.greater(below, 0)
    quotient: Array = np.where(some, above / np.where(some, below, 1.0), np.inf)
    return quotient[()]


# -- more devices ----------------------------------------------------------------------------------------------------------


def amdahl(serial_share: Values, devices: Values) -> Values:
    """How many times faster the same work gets on so many devices if a share of it does not get faster (Amdahl, 1967)."""
    return 1 / (serial_share + (1 - serial_share) / devices)
