"""QSGD (Alistarh et al. 2017): multiples of a step in b bits, rounded up or down at random.

The expected value of a rounded number is the number itself. The scale is the block's largest magnitude, as in
the paper's experiments, and not its norm: with a norm and few bits the error would exceed the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.codecs.base import Argument
from shardwise.codecs.blocks import Multiples

SHARE_BY_BITS = {2: 0.65, 3: 0.67, 4: 0.69, 5: 0.705, 6: 0.72, 7: 0.735, 8: 0.75}
"""`gpu_share` by the number of bits: measured for 2, 3, 4 and 8 bits, and interpolated linearly between."""


@dataclass(frozen=True)
class QSGD(Multiples):
    """Rounds each number at random to a multiple in b bits: n b / 8 bytes and the scales."""

    name = "qsgd"
    argument = Argument(2, 8, whole=True, example="qsgd(4)")
    kind = "drawn"
    host_nanoseconds = (23.5, 4.2)

    @property
    def gpu_share(self) -> float:
        """Bandwidth on a GPU, by the number of bits."""
        return SHARE_BY_BITS[self.bits]

    @property
    def bits(self) -> int:
        """Number of bits of a code, which the job chooses."""
        return int(self.argument_value)

    @property
    def shrinks_errors(self) -> bool:
        """Whether errors are smaller than the gradient. In two bits they are larger, and average out over
        steps instead."""
        return self.argument_value > 2
