"""Samples of a program's dataset: random numbers that are drawn for a sample follow from its place in the
run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from shardwise.data.random_numbers import generators_restored, seed_process
from shardwise.data.samples import MicroBatch, Reading, Samples
from shardwise.data.streams import Stream

CPU = torch.device("cpu")
BATCH, STEPS = 4, 4


class Augmented:
    """Its samples are numbers from the three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def micro_batches(
    samples: Samples, rows: range = range(BATCH), parts: int = 1, seen: int = 0
) -> Iterator[MicroBatch]:
    """What a device with these rows of each global batch reads up to the last step."""
    reader = samples.reader(Reading(BATCH, rows, parts, CPU, torch.float32, seen))
    for _ in range(STEPS - seen // BATCH):
        yield from next(reader)


def drawn(batches: Iterator[MicroBatch]) -> dict[int, Sequence[float]]:
    """The random numbers of each sample, by its number in the run."""
    return {part.first + place: row for part in batches for place, row in enumerate(part.values.tolist())}


WHOLE = drawn(micro_batches(Samples(Augmented(), seed=3)))


def test_each_sample_of_a_run_draws_numbers_of_its_own_also_in_the_next_epoch() -> None:
    numbers = [number for row in WHOLE.values() for number in row]
    assert len(set(numbers)) == 3 * BATCH * STEPS > 3 * len(Augmented())
    other = drawn(micro_batches(Samples(Augmented(), seed=4)))
    assert not {number for row in other.values() for number in row} & set(numbers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_draws_the_same_on_any_device_and_in_any_process(workers: int) -> None:
    samples = Samples(Augmented(), workers=workers, seed=3)
    random.seed()  # as in another process
    first, second = (drawn(micro_batches(samples, rows, 2)) for rows in (range(2), range(2, 4)))
    assert first | second == WHOLE


def test_a_run_that_continues_draws_what_an_undisturbed_one_draws() -> None:
    found = drawn(micro_batches(Samples(Augmented(), seed=3), seen=2 * BATCH))
    assert found == {number: WHOLE[number] for number in range(2 * BATCH, STEPS * BATCH)}


def test_a_part_of_a_dataset_draws_by_sample_too() -> None:
    """torch's `Subset`, which `random_split` makes, would read a whole micro-batch at once."""
    assert drawn(micro_batches(Samples(Subset(Augmented(), range(10)), seed=3), parts=2)) == WHOLE


class Wander:
    """A stream that draws its samples."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield Augmented()[0]


def test_all_devices_draw_the_same_stream_and_draw_it_again_after_a_resume() -> None:
    whole = drawn(micro_batches(Stream(Wander(), seed=3)))
    torch.rand(3)  # as the loss function of another device does
    assert drawn(micro_batches(Stream(Wander(), seed=3), range(2, 4))) == {
        number: row for number, row in whole.items() if number % BATCH >= 2
    }
    rest = drawn(micro_batches(Stream(Wander(), seed=3), seen=2 * BATCH))
    assert rest == {number: whole[number] for number in range(2 * BATCH, STEPS * BATCH)}


def states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def with_noise(samples: list[Any]) -> Tensor:
    return torch.tensor([[torch.rand(()).item() + random.random() + np.random.rand()] for _ in samples])


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_a_collate_function_draws_the_same_after_a_resume(kind: type[Samples]) -> None:
    data = [torch.zeros(1)] * 10
    whole, rest = (
        drawn(micro_batches(kind(data, with_noise, seed=3), parts=2, seen=seen)) for seen in (0, 2 * BATCH)
    )
    assert rest == {number: whole[number] for number in range(2 * BATCH, STEPS * BATCH)}
    assert len({tuple(row) for row in whole.values()}) == STEPS * BATCH


def test_reading_leaves_the_generators_as_they_are() -> None:
    samples = Samples(Augmented(), with_noise)
    before = states()
    list(micro_batches(samples))
    first, second = (torch.stack([*chain(*samples.chunks(4))]) for _ in range(2))
    assert states() == before
    assert torch.equal(first, second)


def test_a_process_is_seeded_in_all_its_generators_and_put_back() -> None:
    found = []
    for _ in range(2):
        Augmented()[0]  # the generators stand elsewhere each time
        before = states()
        with generators_restored(gpus=True):
            seed_process(2**40 + 1)
            found.append(Augmented()[0].tolist())
        assert states() == before
    assert found[0] == found[1]
