"""One file per axis, and `apply`, which orders them."""

from shardwise.parallel.apply import DTYPES, build_plain, check_module, count_parameters, is_compiled, parallelise
from shardwise.parallel.model import ParallelModel

__all__ = [
    "DTYPES",
    "ParallelModel",
    "build_plain",
    "check_module",
    "count_parameters",
    "is_compiled",
    "parallelise",
]
