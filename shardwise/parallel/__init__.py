"""One file per axis, and `apply`, which orders them."""

from shardwise.parallel.apply import (
    build_plain,
    check_first_values,
    check_module,
    count_parameters,
    draw_weights,
    embedded_ids,
    is_compiled,
    parallelise,
)
from shardwise.parallel.model import ParallelModel

__all__ = [
    "ParallelModel",
    "build_plain",
    "check_first_values",
    "check_module",
    "count_parameters",
    "draw_weights",
    "embedded_ids",
    "is_compiled",
    "parallelise",
]
