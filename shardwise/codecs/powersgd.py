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
    argument = Argument(1, 1024, whole=True, example="powersgd(4)")
    host_nanoseconds = (2.6, 0.8)  # of its products alone, timed by hand on matrices of 50 M parameters
    gpu_share = 0.50  # not measured: a guess, because its products are thin

    @property
    def rank(self) -> int:
        """The rank that the job asks for."""
        return int(self.argument_value)

    @property
    def memory_traffic(self) -> tuple[float, float]:
        """Return the passes over a float32 matrix. To encode, two products read it, and subtracting what was
        sent reads and writes it; to decode, it is written once. The factors are small in comparison."""
        return 16.0, 4.0
