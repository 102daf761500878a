"""PowerSGD (Vogels et al. 2019): two thin factors of each matrix, 4 r (rows + columns) bytes.

comm/low_rank.py explains the iteration and sums the factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.codecs.base import Argument, MatrixCodec


@dataclass(frozen=True)
class PowerSGD(MatrixCodec):
    """Sends two factors of rank r of each matrix."""

    name = "powersgd"
    sends = "two factors of rank r of each matrix"
    argument = Argument(1, 1024, whole=True, example="powersgd(4)")
    host_nanoseconds = (2.6, 0.8)  # of its products alone, timed by hand on matrices of 50 M parameters

    @property
    def rank(self) -> int:
        """The rank that the job asks for."""
        return int(self.number)

    @property
    def gpu_share(self) -> float:
        """Not measured, but taken to be half: its products are thin."""
        return 0.50

    @property
    def memory_traffic(self) -> tuple[float, float]:
        """Two products read the matrix, and subtracting what was sent reads and writes it; putting the sum
        together writes it. The factors are small beside it."""
        return 16.0, 4.0
