"""Number of tokens that the loss computes at a time, so that their logits stay within a budget.

The output head and the cross-entropy are computed chunk by chunk (models/loss.py), and tensor devices
exchange a few numbers per token in each chunk. The size of a chunk decides memory and messages, so the cost
model computes it by the same function as the runtime.
"""

from __future__ import annotations

from shardwise.config.schedules import Numbers

CHUNK_BYTES = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
"""Bytes of logits that the loss holds at once, by the type of device."""
FLOAT8_CHUNKS = 4
"""How many times larger chunks are in float8 on GPUs."""


def chunk_bytes(device_type: str) -> int:
    """Return the budget of logits on this type of device."""
    return CHUNK_BYTES["cpu" if device_type == "cpu" else "cuda"]


def chunk_tokens(
    tokens: Numbers, vocabulary: Numbers, value_bytes: int, device_type: str, float8: bool = False
) -> Numbers:
    """Return the number of tokens in a chunk, so that its logits stay within the budget and chunks are even.

    A GPU's float8 products cannot add to an existing gradient, so each chunk costs a pass over the gradient
    of the weight. There chunks are fewer and larger, with a multiple of 16 tokens.

    `vocabulary` is the largest part that a tensor device has. With it all tensor devices have the same number
    of chunks, which they need because each chunk ends with a sum over all of them.
    """
    larger = FLOAT8_CHUNKS if float8 and device_type != "cpu" else 1
    at_most = _at_least_one(larger * chunk_bytes(device_type) // (vocabulary * value_bytes))
    evenly = _at_least_one(-(-tokens // _at_least_one(-(-tokens // at_most))))
    return -(-evenly // 16) * 16 if larger > 1 else evenly


def largest_part(rows: Numbers, devices: Numbers) -> Numbers:
    """Return the number of rows of the first device if rows are split as by torch.chunk. The last device may
    have fewer."""
    return -(-rows // devices)


def _at_least_one(count: Numbers) -> Numbers:
    return count + (count == 0)
