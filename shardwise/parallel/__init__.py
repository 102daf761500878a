"""One file per axis, and `apply`, which orders them."""

from shardwise.parallel.apply import DTYPES, is_compiled, parallelise
from shardwise.parallel.data import Alone

__all__ = ["DTYPES", "Alone", "is_compiled", "parallelise"]
