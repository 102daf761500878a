"""Which samples of a program's dataset each device reads in each step.

The order is a function of seed and position (data/order.py): every epoch is another permutation, which any
rank computes for any position. So the only state is the number of samples that the run has seen, and a run
goes on exactly where it stopped, on any number of devices.

torch's `DataLoader` reads the samples, with as many reading processes as the program asks for. Its sampler
here yields the numbers and indices of one micro-batch after the other, without end.

A dataset may draw random numbers, as augmentation does. Before each sample the generators are seeded from the
job's seed and the number of the sample in the run (data/random_numbers.py). So a sample is augmented in the
same way on whatever device, in whatever process and before or after a resume, and in another way in the next
epoch. For that, samples are read one by one: a dataset's `__getitems__` is not called.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwise.data.batches import split_evenly
from shardwise.data.order import Order
from shardwise.data.random_numbers import generators_restored, seed_sample
from shardwise.errors import UserError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Samples:
    """A dataset whose samples are read by number, and how a list of samples becomes a batch."""

    dataset: Any
    """The user's dataset, which has `__len__` and `__getitem__`."""
    collate: Collate | None = None
    workers: int = 0
    """Number of processes that read ahead."""
    seed: int = 0
    """Seed of the order in which samples are read, and of the random numbers that they draw."""
    sequences: tuple[str, ...] = ()
    """Names of the entries of a batch that are sequences, in dim 1: devices of the context axis share them.
    """

    @cached_property
    def order(self) -> Order:
        """The order in which the samples are read, epoch by epoch."""
        return Order((len(self.dataset),), (1.0,), self.seed)

    def count(self) -> int:
        """Return the number of samples of the dataset."""
        return len(self.dataset)

    def collated(self, samples: list[Any], number: int) -> Any:
        """Return a batch of these samples, of which the first has this number in the run. Random numbers
        that the collate function draws follow from that number."""
        if self.collate is None:
            return default_collate(samples)
        with generators_restored():
            seed_sample(self.seed, number, "collate")
            return self.collate(samples)

    def samples_at(self, places: Iterable[tuple[int, int]]) -> list[Any]:
        """Return samples by their numbers in the run and their indices in the dataset. Random numbers that
        the dataset draws for a sample follow from its number."""
        samples = []
        with generators_restored():
            for number, index in places:
                seed_sample(self.seed, number)
                samples.append(self.dataset[index])
        return samples

    def chunks(self, size: int) -> Iterator[list[Any]]:
        """Yield all samples once, by lists of this many; the last one may be shorter."""
        for first in range(0, self.count(), size):
            indices = range(first, min(first + size, self.count()))
            yield self.samples_at(zip(indices, indices, strict=True))

    def reader(self, reading: Reading) -> Reader:
        """Return a reader of a device's micro-batches. It needs no state of the dataset."""
        return SampleReader(self, reading)

    def indices(self, first: int, count: int) -> list[int]:
        """Return the numbers in the dataset of samples that follow each other in the run."""
        return [int(index) for index in self.order.at(np.arange(first, first + count, dtype=np.int64))[1]]

    def fingerprint(self, first: int) -> int:
        """Return a checksum of the sample at a place of the run."""
        return checksum([len(self.dataset), *self.indices(first, 1)])


@dataclass(frozen=True)
class MicroBatch:
    """Samples that a device computes with at once."""

    values: Any
    """What the collate function made of them, on the device."""
    first: int
    """Number of the first sample in the run."""
    checksum: int
    """Sum of the checksums of the samples' numbers in the dataset."""


@dataclass(frozen=True)
class Reading:
    """Which samples a device reads, and where it begins."""

    global_batch: int
    rows: range
    """The samples of this device in each global batch."""
    micro_batches: int
    """Number of micro-batches that they are divided into."""
    device: torch.device
    dtype: torch.dtype
    seen: int = 0
    """Number of samples that the run has seen."""
    state: object = None
    """State of the dataset at that place, if one was saved."""


class Reader(Protocol):
    """Yields a device's micro-batches, step after step without end."""

    def __next__(self) -> list[MicroBatch]:
        """Return the micro-batches of the next step."""

    def state_at(self, seen: int) -> object:
        """Return the state of the dataset after this many samples of the run; None: it has none."""

    def sample(self) -> Any:
        """Return one sample. Called after the first step's samples were read."""


class SampleReader:
    """Reads the samples of a dataset that returns each by its number."""

    def __init__(self, samples: Samples, reading: Reading) -> None:
        self._samples, self._reading, device = samples, reading, reading.device
        if samples.workers:
            # A worker is a daemon of its host, and Python lets a daemon start no processes. Those of the
            # loader are daemons too, and end when they see that this process has ended.
            multiprocessing.current_process().daemon = False
        loader: DataLoader[Any] = DataLoader(
            _Numbered(samples),
            batch_sampler=_Sampler(samples, reading),
            collate_fn=lambda batch: samples.collated(*batch),
            num_workers=samples.workers,
            multiprocessing_context="fork" if samples.workers else None,  # a dataset may be in no module
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # so that torch's own generator stays as it is
        )
        # Nothing here refers to the reader itself: it then ends with its last use, and its processes at once.
        # In a cycle they would be found by the garbage collector, and each would take seconds to end.
        self._values, self._places = iter(loader), _micro_batches(samples, reading)

    def state_at(self, seen: int) -> object:
        """Return None: the number of samples that the run has seen says everything."""

    def sample(self) -> Any:
        """Return the first sample of the run."""
        return self._samples.samples_at([(0, self._samples.indices(0, 1)[0])])[0]

    def __next__(self) -> list[MicroBatch]:
        """Return the micro-batches of the next step."""
        batches = []
        for _ in range(self._reading.micro_batches):
            first, indices = next(self._places)
            values = to_device(next(self._values), self._reading.device, self._reading.dtype)
            batches.append(MicroBatch(values, first, checksum(indices)))
        return batches


def checksum(indices: Sequence[int]) -> int:
    """Return the sum of the CRC-32 of each sample's number in the dataset."""
    return sum(zlib.crc32(index.to_bytes(8, "little")) for index in indices)


def to_device(values: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch on a device. A proof in float64 computes with numbers of 64 bits, so it casts them."""
    if isinstance(values, Tensor):
        wide = dtype == torch.float64 and values.is_floating_point()
        return values.to(device, dtype if wide else values.dtype, non_blocking=True)
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
        return dataclasses.replace(values, **to_device(fields, device, dtype))
    if type(values) in (dict, OrderedDict):
        return type(values)((key, to_device(value, device, dtype)) for key, value in values.items())
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(to_device(value, device, dtype) for value in values))
    if isinstance(values, list | tuple):
        return type(values)(to_device(value, device, dtype) for value in values)
    return values.to(device) if hasattr(values, "to") else values


def with_positions(
    values: Any, sequences: Sequence[str], positions: Callable[[int], Tensor] | None, multiple: int
) -> Any:
    """Return a batch with the tokens of this device in its sequences, and their positions as `positions`.

    `positions` returns those of this device's tokens in a sequence of a length, which must be a multiple of
    `multiple`; None: it has all tokens. A batch without sequences stays as it is.
    """
    if not sequences:
        return values
    if not isinstance(values, dict):
        raise UserError(
            f"engine.batches(sequences=…): a batch is a {type(values).__name__}; let the collate function "
            "return a dictionary"
        )
    lengths = {name: _length(values, name) for name in sequences}
    length = lengths[sequences[0]]
    if len(set(lengths.values())) > 1:
        raise UserError(
            f"engine.batches(sequences=…): {', '.join(f'{name} has {n}' for name, n in lengths.items())} "
            "tokens; sequences of one batch have one length"
        )
    if length % multiple:
        raise UserError(
            f"engine.batches(sequences=…): a sequence of {length} tokens cannot be shared by the devices of "
            f"the layout; pad it to a multiple of {multiple} in the collate function"
        )
    if "positions" in values and "positions" not in sequences:
        raise UserError(
            "engine.batches(sequences=…): the batch has an entry 'positions', which would be replaced by the "
            "places of the tokens; name it among the sequences to keep it, or rename it"
        )
    chosen = torch.arange(length, device=values[sequences[0]].device)
    if positions is not None:
        chosen = positions(length)
        values = {**values, **{name: values[name][:, chosen] for name in sequences}}
    return values if "positions" in sequences else {**values, "positions": chosen}


def _length(values: dict[str, Any], name: str) -> int:
    """Return the number of tokens of an entry of a batch."""
    value = values.get(name)
    if isinstance(value, Tensor) and value.ndim >= 2:
        return value.shape[1]
    found = (
        f"a {type(value).__name__}" if name in values else f"missing; it has {', '.join(map(str, values))}"
    )
    raise UserError(
        f"engine.batches(sequences=…): the batch's entry {name!r} is {found}; it must be a tensor (batch, "
        "sequence, …)"
    )


class _Numbered(Dataset[Any]):
    """A dataset whose samples are read by their numbers in the run and their indices, many at once."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return self._samples.samples_at([place])[0]

    def __getitems__(self, places: list[tuple[int, int]]) -> tuple[list[Any], int]:
        """Return samples that follow each other in the run, and the number of the first one."""
        return self._samples.samples_at(places), places[0][0]


class _Sampler:
    """Yields the samples of one micro-batch after the other, by their numbers in the run and indices."""

    def __init__(self, samples: Samples, reading: Reading) -> None:
        self._samples, self._reading = samples, reading

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for first, indices in _micro_batches(self._samples, self._reading):
            yield list(enumerate(indices, start=first))


def _micro_batches(samples: Samples, reading: Reading) -> Iterator[tuple[int, list[int]]]:
    """Yield the number in the run of the first sample of each micro-batch, and the indices of its samples."""
    for step in itertools.count():
        first = reading.seen + step * reading.global_batch + reading.rows.start
        for part in split_evenly(len(reading.rows), reading.micro_batches):
            yield first + part.start, samples.indices(first + part.start, len(part))
