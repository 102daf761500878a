"""What links must do for communication to cost nothing, and how far more devices can help at all.

Communication that runs beside computing costs only what is longer than the computing it hides behind. A ring moves from each
device `wire` bytes in `hops` messages, so hiding behind T seconds needs

    wire / bandwidth + hops x latency <= T

which gives the least bandwidth for a latency and the largest latency for a bandwidth. Bandwidth is that of one device, in one
direction.

How long T is follows from the tokens. A device of C FLOP/s with links of W bytes/s, weights and gradients of 2 bytes:

- data parallel. A gradient sum moves 4 bytes a weight, beside a backward pass of 4 FLOPs a weight and token; ZeRO-3's gathers and
  reductions 2 bytes for each 2 FLOPs. Both hide if a device has at least C/W tokens a step, whatever the model. With P times more
  weights than a token meets (experts) it takes P times the tokens.
- tensor parallel, over t devices. For each token and unit of width, 2 matrices of width f cost 4 f/t FLOPs, and gathering and
  scattering the tokens moves 4 bytes: it takes f/t of at least C/W, whatever the batch. A gated layer has 3 matrices.
- both. With X devices for data and Y for tensor, X is at most tokens / (C/W) and Y at most f / (C/W), so the devices X Y that a
  batch feeds are at most tokens x f / (C/W)^2: a device needs (C/W)^2 / f tokens, far fewer than C/W for a wide model. If the two
  cannot run beside each other the sum of both times must hide, which is least where they are equal, and takes 4 times the tokens.

The three rules are those of "How to Scale Your Model" (Austin et al., 2025), here with the bytes and matrices as arguments.

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


def most_latency(wire: Values, seconds: Values, bandwidth: Values, hops: Values) -> Values:
    """Seconds a hop may take for `wire` bytes to hide behind `seconds` of computing; 0 where the bandwidth alone is too small,
    infinite where there is no hop."""
    return _over(np.maximum(0.0, seconds - wire / bandwidth), hops)


def exposed(wire: Values, seconds: Values, bandwidth: Values, hops: Values = 0.0, latency: Values = 0.0) -> Values:
    """Seconds of communication that stay visible behind `seconds` of computing."""
    return np.maximum(0.0, wire / bandwidth + hops * latency - seconds)


def _over(above: Values, below: Values) -> Values:
    """The quotient, infinite where there is nothing to divide by."""
    some = np.greater(below, 0)
    quotient: Array = np.where(some, above / np.where(some, below, 1.0), np.inf)
    return quotient[()]


# -- tokens and widths -----------------------------------------------------------------------------------------------------


def tokens_to_hide_data(
    flops_per_second: Values, bandwidth: Values, bytes_per_value: Values = 2.0, active_share: Values = 1.0
) -> Values:
    """Tokens a device needs in each step (each micro-batch, where weights are gathered anew) to hide the data axis.
    `bytes_per_value` on the wire; `active_share` of the parameters is what a token meets (1 for a dense model)."""
    return flops_per_second / bandwidth * bytes_per_value / 2 / active_share


def most_tensor(
    ffn: Values, flops_per_second: Values, bandwidth: Values, matrices: Values = 2.0, bytes_per_value: Values = 2.0
) -> Values:
    """The tensor axis up to which a feed-forward layer of `matrices` matrices computes longer than it communicates."""
    return ffn * matrices / bytes_per_value * bandwidth / flops_per_second


def tokens_to_hide_both(
    flops_per_second: Values, data_bandwidth: Values, tensor_bandwidth: Values, ffn: Values, together: bool = True
) -> Values:
    """Tokens a device needs under the best mix of data and tensor devices, each axis on its own links; `together`: whether the
    two axes can communicate at the same time."""
    ratio = (flops_per_second / data_bandwidth) * (flops_per_second / tensor_bandwidth)
    return ratio / ffn * (1 if together else 4)


# -- more devices ----------------------------------------------------------------------------------------------------------


def amdahl(serial_share: Values, devices: Values) -> Values:
    """How many times faster the same work gets on so many devices if a share of it does not get faster (Amdahl, 1967)."""
    return 1 / (serial_share + (1 - serial_share) / devices)


def gustafson(serial_share: Values, devices: Values) -> Values:
    """How many times more work gets done in the same time if the work grows with the devices and a share of the time does not
    shrink (Gustafson, 1988)."""
    return serial_share + (1 - serial_share) * devices


def serial_share(speedup: Values, devices: Values) -> Values:
    """The share that Amdahl's law needs for a speed-up seen on two or more devices (Karp and Flatt, 1990). If it grows with the
    devices it is communication, not serial work, that costs."""
    return (1 / speedup - 1 / devices) / (1 - 1 / devices)
