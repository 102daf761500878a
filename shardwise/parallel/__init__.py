"""One file per axis, and `apply`, which orders them."""

from shardwise.parallel.apply import build_plain, first_values, parallelise
from shardwise.parallel.parallel_model import ParallelModel

__all__ = ["ParallelModel", "build_plain", "first_values", "parallelise"]
