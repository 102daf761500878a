"""How long a probe takes: which sizes it measures, and how often.

Each time is the median over a few windows, each of many calls. A window is so long (tens of milliseconds on a
CPU) that the clock's resolution, the start of the workers and the scheduling of cores do not matter. The full
probe takes less than two minutes with four workers on two cores. The quick probe measures the same things at
fewer sizes and takes seconds; it is for training without a cluster file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from shardwise.probe.fit import Shape

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Budget:
    """What to measure on one kind of device."""

    window: float
    """Seconds of one window. A window has at least one call."""
    windows: int
    """Number of windows whose median is taken."""
    shapes: tuple[Shape, ...]
    """Shapes of the matrix products in the main precision."""
    few_shapes: tuple[Shape, ...]
    """Shapes of the matrix products in each other precision, whose knee is assumed to be the same."""
    lengths: tuple[int, ...]
    """Sequence lengths at which attention is measured."""
    stream_bytes: int
    """Total bytes of the tensors that elementwise kernels use in turn."""
    sustained: float
    """Seconds for which one large product is repeated, so that a power limit shows."""
    sizes: tuple[int, ...]
    """Bytes of the tensors in collectives."""
    every_group: bool
    """Whether groups of every size are measured, or only the group of all devices."""


def _cube(*lengths: int) -> list[Shape]:
    return list(product(lengths, lengths, lengths))


_QUICK_CPU = (
    (64, 64, 64),
    (256, 256, 256),
    (1024, 1024, 1024),
    (1024, 64, 256),
    (64, 1024, 256),
    (256, 1024, 64),
)
_QUICK_GPU = (
    (512, 512, 512),
    (2048, 2048, 2048),
    (8192, 8192, 8192),
    (8192, 512, 2048),
    (512, 8192, 2048),
    (2048, 8192, 512),
)

FULL = {
    "cpu": Budget(
        window=0.06,
        windows=5,
        shapes=(*_cube(64, 256, 1024), (32, 512, 512), (512, 32, 512), (512, 512, 32), (2048, 2048, 1024)),
        few_shapes=((256, 256, 256), (1024, 256, 1024), (1024, 1024, 256), (1024, 1024, 1024)),
        lengths=(64, 128, 256, 512, 1024),
        stream_bytes=128 * MIB,
        sustained=0.0,
        sizes=(KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
        every_group=True,
    ),
    "cuda": Budget(
        window=0.05,
        windows=5,
        shapes=(*_cube(512, 2048, 8192), (16384, 4096, 4096), (128, 4096, 4096), (4096, 128, 4096)),
        few_shapes=((4096, 4096, 4096), (8192, 8192, 8192)),
        lengths=(512, 1024, 2048, 4096, 8192),
        stream_bytes=2048 * MIB,
        sustained=2.0,
        sizes=(KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
        every_group=True,
    ),
}
QUICK = {
    "cpu": Budget(
        0.02,
        3,
        _QUICK_CPU,
        ((512, 512, 512),),
        (128, 512),
        64 * MIB,
        0.0,
        (KIB, 64 * KIB, MIB, 4 * MIB),
        False,
    ),
    "cuda": Budget(
        0.01,
        3,
        _QUICK_GPU,
        ((8192,) * 3,),
        (1024, 4096),
        1024 * MIB,
        0.5,
        (KIB, 256 * KIB, 4 * MIB, 64 * MIB),
        False,
    ),
}
