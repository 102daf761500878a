"""Samples of a program that come one after the other: an iterable dataset instead of one that is read by
number.

Every device reads the whole stream and keeps the samples of its rows. So the samples of a step do not depend
on the number of devices, and the state of the run is one place in the stream: if the dataset has `state_dict`
and `load_state_dict`, as those of torchdata and Hugging Face have, a run goes on from the state that was
saved with the checkpoint. Otherwise it reads again what it has read before. A stream that ends begins again.

Random numbers that a stream draws while the samples of a step are read follow from the number of the first
one. So all devices see the same stream, and see it again when they read up to their place. They do not follow
from each sample, because a stream may draw ahead, for a shuffled buffer for example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from shardwise.data.batches import split_evenly
from shardwise.data.random_numbers import generators_restored, seed_sample
from shardwise.data.samples import Collate, MicroBatch, Reader, Reading, Samples, checksum, to_device
from shardwise.errors import UserError


@dataclass(frozen=True)
class Stream(Samples):
    """A dataset that is iterated over."""

    def fingerprint(self, first: int) -> int:
        """Return a checksum of a place in the stream, whose samples have no numbers of their own."""
        return checksum([first])

    def chunks(self, size: int) -> Iterator[list[Any]]:
        """Yield all samples once, by lists of this many; the last one may be shorter."""
        samples, number = chain.from_iterable((self.dataset,)), 0  # begins inside of `take`
        while chunk := self.take(samples, size, number):
            number += len(chunk)
            yield chunk

    def take(self, samples: Iterator[Any], count: int, number: int) -> list[Any]:
        """Return the next samples of an iteration over the stream, of which the first has this number."""
        with generators_restored():
            seed_sample(self.seed, number, "stream")
            return list(islice(samples, count))

    def reader(self, reading: Reading) -> Reader:
        """Return a reader of a device's micro-batches."""
        return StreamReader(self, reading)

    def read(self, before_second_pass: Callable[[], None] | None = None) -> Iterator[Any]:
        """Yield samples without end. `before_second_pass` is called after a first pass that begins somewhere
        in the stream, and may have no samples left."""
        while True:
            count = 0
            for sample in self.dataset:
                count += 1
                yield sample
            if before_second_pass is not None:
                before_second_pass()
                before_second_pass = None
            elif not count:
                raise UserError(
                    f"engine.batches: {type(self.dataset).__name__} yields no samples; an iterable dataset "
                    "has to yield some each time that a loop over it begins"
                )


def samples_of(
    call: str,
    dataset: Any,
    collate: Collate | None,
    workers: int = 0,
    sequences: tuple[str, ...] = (),
) -> Samples:
    """Return the samples of a dataset, which are read by number if it can do that."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return Samples(dataset, collate, workers, sequences=sequences)
    if isinstance(dataset, DataLoader):
        raise UserError(
            f"{call}: this is a DataLoader, which makes batches already; give its dataset, and its "
            "collate_fn as collate="
        )
    if isinstance(dataset, Iterator) or not hasattr(dataset, "__iter__"):
        raise UserError(
            f"{call}: {type(dataset).__name__} is no dataset; give one with __len__ and __getitem__, or one "
            "with __iter__, over which several loops can go one after the other"
        )
    return Stream(dataset, collate, workers, sequences=sequences)


class StreamReader:
    """Reads the samples of a dataset that is iterated over."""

    def __init__(self, stream: Stream, reading: Reading) -> None:
        self._stream, self._reading = stream, reading
        self._seen, dataset, state = reading.seen, stream.dataset, reading.state
        if state is not None and hasattr(dataset, "load_state_dict"):
            beginning = self._state()
            dataset.load_state_dict(state)
            # A dataset may begin every pass from the state that it has loaded.
            self._samples = stream.read(lambda: dataset.load_state_dict(beginning))
        else:
            self._samples = stream.read()
            for place in range(0, reading.seen, reading.global_batch):
                stream.take(self._samples, min(reading.global_batch, reading.seen - place), place)
        self._states = {reading.seen: self._state()}
        self._sample: Any = None

    def state_at(self, seen: int) -> object:
        """Return the state of the dataset after this many samples; None: it has no such state."""
        return self._states.get(seen)

    def sample(self) -> Any:
        """Return the last sample that was read. To iterate once more could change the dataset's place."""
        return self._sample

    def _state(self) -> object:
        dataset = self._stream.dataset  # which may go on changing what it returns
        return copy.deepcopy(dataset.state_dict()) if hasattr(dataset, "state_dict") else None

    def __next__(self) -> list[MicroBatch]:
        """Return the micro-batches of the next step."""
        reading = self._reading
        samples = self._stream.take(self._samples, reading.global_batch, self._seen)
        self._sample, batches = samples[-1], []
        for part in split_evenly(len(reading.rows), reading.micro_batches):
            places = range(reading.rows.start + part.start, reading.rows.start + part.stop)
            numbers = [self._seen + place for place in places]
            values = self._stream.collated([samples[place] for place in places], numbers[0])
            values = to_device(values, reading.device, reading.dtype)
            batches.append(MicroBatch(values, numbers[0], checksum(numbers)))
        self._seen += reading.global_batch
        # The states before and after this step's samples: a save may be of either.
        last = max(self._states)
        self._states = {last: self._states[last], self._seen: self._state()}
        return batches
