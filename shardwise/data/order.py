"""The order of samples, as a pure function of (seed, position).

A shuffled epoch is usually a permutation in memory, and the position in it is a state to save. Here the
permutation is computed: a keyed Feistel network (Luby and Rackoff, "How to construct pseudorandom
permutations", 1988) is a bijection on an even number of bits, and following its cycles until the value is
below `size` makes it a bijection on [0, size) (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). Any rank can compute any position, so the data position of a run is the number of samples it has seen,
whatever the number of data-parallel devices. The cost is no memory, and six rounds of integer arithmetic per
pass through the network. The domain is at most four times the size, so at most about four passes are
expected.

Several sources are mixed without counting from the start what was drawn. The weights become whole-number
quotas of a cycle of 65,536 positions, and each cycle is shuffled with its own key. Every cycle therefore
contains each source exactly in proportion, and the number of samples that a source gave in all earlier cycles
is a multiplication. Only the counts within one cycle are in a table (1 MiB, computed once per cycle). Each
source is thus read in the order of its epochs, and no sample comes twice in one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

UnsignedIntegers = NDArray[np.uint64]
Integers = NDArray[np.int64]

CYCLE = 65536
"""Number of positions in a cycle of a mixture of sources."""
ROUNDS = 6
"""Number of rounds of the Feistel network."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EPOCH, _MIX, HELD_OUT = 1, 2, 3
"""First parts of keys, which keep the keys of different uses apart."""


def _scramble(value: UnsignedIntegers) -> UnsignedIntegers:
    """Apply one step of splitmix64 (Steele, Lea and Flood, 2014): every output bit depends on every input
    bit.
    """
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def key(*parts: int | Integers) -> UnsignedIntegers:
    """Return one key per element, from numbers and arrays of numbers. Different parts give unrelated keys."""
    state: UnsignedIntegers = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)
        state = _scramble(state ^ word)
    return state


def permute(index: Integers, size: int, keys: UnsignedIntegers | int) -> Integers:
    """Apply a bijection on [0, size) to each index; `keys` is one key, or one key for each index."""
    assert size >= 1, "nothing to permute"
    value = np.atleast_1d(index).astype(np.uint64)
    assert value.size == 0 or int(value.max()) < size, "index outside [0, size)"
    lanes = np.broadcast_to(key(keys) if isinstance(keys, int) else keys, value.shape)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(value, half, lanes)
    while (outside := np.flatnonzero(value >= size)).size:
        value[outside] = _feistel(value[outside], half, lanes[outside])
    return value.astype(np.int64)


def _feistel(value: UnsignedIntegers, half: int, keys: UnsignedIntegers) -> UnsignedIntegers:
    """Run the rounds of the network.

    Each round swaps the halves and mixes one into the other, which can be inverted for any mixing function.
    """
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for number in range(ROUNDS):
        round_key = _scramble(keys ^ np.uint64(number))
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << shift) | right


def quotas(weights: Sequence[float], cycle: int = CYCLE) -> Integers:
    """Return whole numbers in proportion to the weights, at least 1 each, that sum to the cycle.

    Rounding up begins with the largest remainders.
    """
    assert 0 < len(weights) <= cycle, "more sources than positions in a cycle"
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * cycle
    shares: Integers = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = cycle - int(shares.sum())
    if missing > 0:
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # raising tiny weights to 1 may exceed the sum; the largest source gives way
        shares[np.argmax(shares)] -= 1
    return shares


@dataclass(frozen=True)
class Order:
    """Says which sample of which source is at a position of the endless stream of training samples."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def at(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return, for each position, the source, the sample in it, and the epoch of that source."""
        sources, index = self._mix(positions)
        sizes = np.asarray(self.sizes, dtype=np.int64)[sources]
        epochs, within = index // sizes, index % sizes
        samples = np.empty_like(within)
        for source, size in enumerate(self.sizes):
            selected = np.flatnonzero(sources == source)
            samples[selected] = permute(
                within[selected], size, key(self.seed, _EPOCH, source, epochs[selected])
            )
        return sources, samples, epochs

    def _mix(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return the source of each position, and the number of earlier positions with the same source."""
        if len(self.sizes) == 1:
            return np.zeros_like(positions), positions
        shares = quotas(self.weights)
        cycles, within = positions // CYCLE, positions % CYCLE
        sources, index = np.empty_like(positions), np.empty_like(positions)
        for cycle in np.unique(cycles).tolist():
            selected = np.flatnonzero(cycles == cycle)
            pattern, ranks = _cycle(tuple(shares.tolist()), self.seed, cycle)
            sources[selected] = pattern[within[selected]]
            index[selected] = cycle * shares[sources[selected]] + ranks[within[selected]]
        return sources, index


@lru_cache(maxsize=4)
def _cycle(shares: tuple[int, ...], seed: int, cycle: int) -> tuple[Integers, Integers]:
    """Return the source at each position of a cycle, and the number of earlier positions with the same
    source.
    """
    shuffled = permute(np.arange(CYCLE), CYCLE, key(seed, _MIX, cycle))
    pattern = np.repeat(np.arange(len(shares)), shares)[shuffled]
    by_source = np.argsort(pattern, kind="stable")
    starts = np.cumsum([0, *shares[:-1]])
    ranks = np.empty(CYCLE, dtype=np.int64)
    ranks[by_source] = np.arange(CYCLE) - starts[pattern[by_source]]
    return pattern, ranks
