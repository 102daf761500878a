"""How many tokens the loss walks through at a time, so that their logits stay within a budget.

The output head and the cross-entropy are computed chunk by chunk (models/loss.py), and tensor devices
exchange a few numbers of each token once a chunk. So the chunk decides memory and messages, and the cost
model has to cut as the runtime does.
"""

from __future__ import annotations

from typing import Any

Count = Any
"""An int of one device; an array of the cost model's candidates."""

CHUNK_BYTES = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
"""Logits that the loss holds at once, by the type of the device."""


FLOAT8_CHUNKS = 4
"""How much larger chunks are there."""


def chunk_bytes(device_type: str) -> int:
    """The budget on this type of device."""
    return CHUNK_BYTES["cpu" if device_type == "cpu" else "cuda"]


def chunk_tokens(
    tokens: Count, vocabulary: Count, value_bytes: int, device_type: str, float8: bool = False
) -> Count:
    """Tokens a chunk: as many as keep its logits within the budget, spread evenly over the chunks. For
    numbers and for arrays. float8 products of a GPU add nothing to what is there, so each chunk costs a pass
    over the gradient of the weight: fewer and larger ones, of a round number of tokens.

    `vocabulary` is the largest part of it that a tensor device has, so that all of them cut alike: a device
    that cut by its own, fewer rows would be done with its chunks while the others wait for its sums.
    """
    larger = FLOAT8_CHUNKS if float8 and device_type != "cpu" else 1
    at_most = _at_least_one(larger * chunk_bytes(device_type) // (vocabulary * value_bytes))
    evenly = _at_least_one(-(-tokens // _at_least_one(-(-tokens // at_most))))
    return -(-evenly // 16) * 16 if larger > 1 else evenly


def largest_part(rows: Count, devices: Count) -> Count:
    """Of rows that devices share as torch.chunk deals them out: the first devices have so many, the last ones
    fewer, or none."""
    return -(-rows // devices)


def _at_least_one(count: Count) -> Count:
    return count + (count == 0)
