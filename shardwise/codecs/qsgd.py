"""QSGD (Alistarh et al. 2017): multiples of a step in b bits, rounded up or down by chance.

The mean over draws is the number itself. The scale is the block's largest magnitude, as in the paper's
experiments, and not its norm: with few bits the error would else exceed the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.codecs.base import Argument
from shardwise.codecs.blocks import Multiples

SHARE_BY_BITS = {2: 0.65, 3: 0.67, 4: 0.69, 5: 0.705, 6: 0.72, 7: 0.735, 8: 0.75}
"""Share of a copy's bandwidth by the number of bits: measured on an H200 with 268 M numbers in 2, 3, 4 and 8
bits, and in between on a straight line."""


@dataclass(frozen=True)
class QSGD(Multiples):
    """Rounds each number by chance to a multiple of b bits: n b / 8 bytes and the scales."""

    name = "qsgd"
    sends = "each as a multiple of a step in b = 2 to 8 bits, by chance: the mean is right"
    argument = Argument(2, 8, whole=True, example="qsgd(4)")
    kind = "drawn"
    host_nanoseconds = (23.5, 4.2)

    @property
    def gpu_share(self) -> float:
        """By the number of bits."""
        return SHARE_BY_BITS[self.bits]

    @property
    def bits(self) -> int:
        """The bits that the job asks for."""
        return int(self.number)

    @property
    def shrinks_errors(self) -> bool:
        """In two bits the error exceeds the gradient; it averages out over steps instead."""
        return self.number > 2
