from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from shardwise.config import Data
from shardwise.data.batches import Batch, Batches
from shardwise.data.dataset import Dataset, Rows
from shardwise.data.prepare import prepare
from shardwise.errors import UserError


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "reset"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "a.jsonl").write_text("\n".join(f'{{"text": "document {i}"}}' for i in range(200)))
    prepare(folder / "a.jsonl", "bytes", folder / "out")
    return Dataset.open(Data(source=str(folder / "out"), sequence_length=8, reset_attention=request.param), 0)


def check(micro_batches: list[Batch], rows: Rows, micro_batch: int) -> None:
    assert torch.equal(torch.cat([batch.inputs for batch in micro_batches]), torch.from_numpy(rows.inputs))
    assert torch.equal(torch.cat([batch.targets for batch in micro_batches]), torch.from_numpy(rows.targets))
    assert all(batch.inputs.shape == (micro_batch, 8) for batch in micro_batches)
    assert sum(batch.valid for batch in micro_batches) == rows.valid
    assert [batch.valid for batch in micro_batches] == [
        int((batch.targets != -100).sum()) for batch in micro_batches
    ]
    if rows.documents is None:
        assert all(batch.documents is None for batch in micro_batches)
    else:
        documents = [batch.documents for batch in micro_batches if batch.documents is not None]
        assert torch.equal(torch.cat(documents), torch.from_numpy(rows.documents))


def test_each_step_gives_the_ranks_rows_in_micro_batches(dataset: Dataset) -> None:
    with Batches(dataset, global_batch=12, rows=range(4, 10), micro_batches=3, device="cpu") as batches:
        for step in range(5):
            check(next(batches), dataset.sequences(12 * step + 4, 6), 2)


def test_resuming_is_starting_after_other_sequences_seen(dataset: Dataset) -> None:
    with Batches(dataset, 8, range(8), 1, "cpu", seen=8003) as batches:
        for first in (8003, 8011):
            check(next(batches), dataset.sequences(first, 8), 8)


def test_rows_may_change_from_step_to_step_and_micro_batches_are_as_even_as_can_be(dataset: Dataset) -> None:
    shares = [range(4), range(2, 9), range(1, 4), range(8)]
    with Batches(dataset, global_batch=9, rows=shares[0], micro_batches=3, device="cpu") as batches:
        for step, share in enumerate(shares):
            found = batches.take(shares[(step + 1) % 4])
            assert np.array_equal(
                np.concatenate([batch.inputs.numpy() for batch in found]),
                dataset.sequences(9 * step + share.start, len(share)).inputs,
            )
            sizes = [len(batch.inputs) for batch in found]
            assert len(sizes) == 3
            assert max(sizes) - min(sizes) <= 1
            assert [batch.first for batch in found] == [
                9 * step + share.start + sum(sizes[:index]) for index in range(3)
            ]


class Failing(Dataset):
    def sequences(self, first: int, count: int) -> Rows:
        if first == 2 * count:
            raise UserError("a damaged shard")
        return super().sequences(first, count)


def test_an_error_while_reading_ahead_is_raised_at_its_step(dataset: Dataset) -> None:
    failing = Failing(dataset.streams, dataset.sequence_length, dataset.reset_attention, dataset.seed)
    batches = Batches(failing, 4, range(4), 2, "cpu")
    next(batches)
    next(batches)
    with pytest.raises(UserError, match="a damaged shard"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_stops_the_thread(dataset: Dataset) -> None:
    before = set(threading.enumerate())
    batches = Batches(dataset, 4, range(4), 2, "cpu")
    next(batches)
    batches.close()
    batches.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(batches)


def test_ranks_together_read_the_whole_batch(dataset: Dataset) -> None:
    parts = []
    for rank in range(4):
        with Batches(dataset, 8, range(rank * 2, rank * 2 + 2), 2, "cpu", seen=24) as batches:
            parts += [batch.inputs.numpy() for batch in next(batches)]
    assert np.array_equal(np.concatenate(parts), dataset.sequences(24, 8).inputs)
