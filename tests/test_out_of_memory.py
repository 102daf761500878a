"""Which exceptions say that there is not enough memory."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from shardwise._torch import is_out_of_memory

MORE_THAN_ANY_MACHINE_HAS = 2**56


@pytest.mark.parametrize(
    "allocate",
    [lambda size: torch.empty(size, dtype=torch.uint8), lambda size: np.empty(size, np.uint8), bytearray],
    ids=["torch", "numpy", "Python"],
)
def test_what_an_allocator_of_this_machine_raises_is_recognised(allocate: object) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as refused:
        allocate(MORE_THAN_ANY_MACHINE_HAS)  # type: ignore[operator]
    assert is_out_of_memory(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4503599627370496 bytes."),
        RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("Storage size calculation overflowed with sizes=[2305843009213693952]"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 EiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_what_allocators_of_other_machines_raise_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "No space left"), ValueError("x")]
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
