"""Rotary positions (Su et al. 2021): turn each query and key by an angle that grows with its position.

Pairs of channels are points in a plane; the pair i at position p is turned by p · theta^(-2i / head_dim). A
query and a key then meet at the difference of their angles, so attention sees relative distance only. As in
Hugging Face's checkpoints, a pair is channel i and channel i + head_dim / 2 ("half rotation"), not two
neighbours.

Llama 3.1 stretches the slow frequencies by `rope_scale`, so that a model trained on `rope_original` tokens
reads longer text: waves that fit more than four times into the original length are kept, waves longer than it
are slowed by the full factor, and those between are blended.

Angles at position 100,000 have lost four decimal digits in float32 and are pure noise in bfloat16. So
frequencies and angles are made in float64, once a forward for the whole model (sequence × head_dim numbers:
nothing), and the rotation itself is computed in float32 inside one fused kernel, whatever the dtype of the
queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.config.model import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, Model
from shardwise.models.torch_dtypes import wide
from shardwise.models.unallocated import ExactBuffers

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each (sequence, 1, head_dim): the 1 is the heads, which all turn alike."""


class Rotary(ExactBuffers):
    """Computes the angles of a sequence. Its frequencies stay float64 whatever the model is cast to."""

    frequencies: Tensor

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Return the angles of these positions (sequence) for activations of this dtype."""
        angles = torch.outer(positions.double(), self.frequencies).unsqueeze(1)  # (sequence, 1, head_dim / 2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(wide(dtype)), torch.cat((-sin, sin), -1).to(wide(dtype))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Return (batch, sequence, heads, head_dim) rotated by its angles.

    The halves are swapped by a flip instead of a slice and a concatenation: the compiler turns it into index
    arithmetic inside the same kernel, forward and backward.
    """
    cos, sin = angles
    swapped = x.reshape(*x.shape[:-1], 2, -1).flip(-2).reshape(x.shape)
    return (x * cos + swapped * sin).to(x.dtype)


def rotary_frequencies(config: Model) -> Tensor:
    """Return the radians per position of each pair of channels: float64, (head_dim / 2)."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-channels / config.head_dim)
    return frequencies if config.rope_scale == 1.0 else _stretch(frequencies, config)


def _stretch(frequencies: Tensor, config: Model) -> Tensor:
    waves_in_original = config.rope_original * frequencies / (2 * math.pi)
    share = (waves_in_original - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)
    share = share.clamp(0, 1)  # of the frequency as it is, in the blend with the slowed one
    return share * frequencies + (1 - share) * frequencies / config.rope_scale
