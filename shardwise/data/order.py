"""The order of samples, as a pure function of (seed, position).

A shuffled epoch is usually a permutation kept in memory, and a run's place in it a state to save. Here the
permutation is computed: a keyed Feistel network (Luby and Rackoff, "How to construct pseudorandom
permutations", 1988) is a bijection on an even number of bits, and walking its cycles until the value falls
below `size` makes it a bijection on [0, size) (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). Any rank can ask for any position, so the data position of a run is how many samples it has seen,
whatever the number of data-parallel devices. Cost: no memory, and six rounds of integer arithmetic a walk;
the domain is at most four times the size, so about four walks are expected at worst.

Several sources are mixed without counting what was drawn since the start. Weights become whole quotas of a
cycle of 65,536 positions, and each cycle is shuffled by its own key; so every cycle holds each source exactly
in proportion, and what a source gave in all earlier cycles is a multiplication. Only the count within one
cycle is tabulated (1 MiB, made once a cycle), so that each source is read in the order of its epochs, and
none of its samples comes twice in one.
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
ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EPOCH, _MIX, HELD_OUT = 1, 2, 3  # keeps the keys of different uses apart


def _scramble(value: UnsignedIntegers) -> UnsignedIntegers:
    """splitmix64's step (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def key(*parts: int | Integers) -> UnsignedIntegers:
    """One key per element, from numbers and arrays of numbers; different parts give unrelated keys."""
    state: UnsignedIntegers = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)
        state = _scramble(state ^ word)
    return state


def permute(index: Integers, size: int, keys: UnsignedIntegers | int) -> Integers:
    """A bijection on [0, size) for each key, applied to each index; `keys` is one key or one an index."""
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
    """Each round swaps the halves and mixes one into the other, which can be undone whatever the mixing
    function."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for number in range(ROUNDS):
        round_key = _scramble(keys ^ np.uint64(number))
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << shift) | right


def quotas(weights: Sequence[float], cycle: int = CYCLE) -> Integers:
    """Whole numbers in proportion to the weights that sum to the cycle: largest remainders first, at least 1
    each."""
    assert 0 < len(weights) <= cycle, "more sources than positions in a cycle"
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * cycle
    shares: Integers = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = cycle - int(shares.sum())
    if missing > 0:
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # raising tiny weights to 1 may overshoot: the largest source gives
        shares[np.argmax(shares)] -= 1
    return shares


@dataclass(frozen=True)
class Order:
    """Which sample of which source stands at a position of the endless stream of training samples."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def at(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """The source, the sample in it, and the epoch of that source, for each position."""
        sources, index = self._mix(positions)
        sizes = np.asarray(self.sizes, dtype=np.int64)[sources]
        epochs, within = index // sizes, index % sizes
        samples = np.empty_like(within)
        for source, size in enumerate(self.sizes):
            mine = np.flatnonzero(sources == source)
            samples[mine] = permute(within[mine], size, key(self.seed, _EPOCH, source, epochs[mine]))
        return sources, samples, epochs

    def _mix(self, positions: Integers) -> tuple[Integers, Integers]:
        """The source of each position, and how many of that source come before it."""
        if len(self.sizes) == 1:
            return np.zeros_like(positions), positions
        shares = quotas(self.weights)
        cycles, within = positions // CYCLE, positions % CYCLE
        sources, index = np.empty_like(positions), np.empty_like(positions)
        for cycle in np.unique(cycles).tolist():
            mine = np.flatnonzero(cycles == cycle)
            pattern, ranks = _cycle(tuple(shares.tolist()), self.seed, cycle)
            sources[mine] = pattern[within[mine]]
            index[mine] = cycle * shares[sources[mine]] + ranks[within[mine]]
        return sources, index


@lru_cache(maxsize=4)
def _cycle(shares: tuple[int, ...], seed: int, cycle: int) -> tuple[Integers, Integers]:
    """One cycle of a mixture: the source at each position, and how many of that source stand before it in the
    cycle."""
    pattern = np.repeat(np.arange(len(shares)), shares)[
        permute(np.arange(CYCLE), CYCLE, key(seed, _MIX, cycle))
    ]
    by_source = np.argsort(pattern, kind="stable")
    starts = np.cumsum([0, *shares[:-1]])
    ranks = np.empty(CYCLE, dtype=np.int64)
    ranks[by_source] = np.arange(CYCLE) - starts[pattern[by_source]]
    return pattern, ranks
