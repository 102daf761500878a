"""A step's checksum is that of the sequences it should have seen, whoever read them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from ranks.jobs import FAMILIES, Tables, job, on_one_device, train
from ranks.pool import Pool

from shardwise.config import from_tables
from shardwise.data import Dataset
from shardwise.data.batches import Batches, checksum

LAYOUTS = [
    {"data": 2},
    {"data": 2, "replica": 2, "zero": 3},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2},
    {"data": 2, "tensor": 2},
    {"pipeline": 2, "context": 2},
]


def tables(corpus: str, layout: dict[str, int]) -> Tables:
    return job(corpus, model=FAMILIES["llama"], train={"micro_batch": 2}, layout={"data": 1, **layout})


def expected(corpus: str) -> list[str]:
    """By hand, from the tokens of the file: 24 ids a sequence as 8 bytes each, and no code of batches or
    steps."""
    config = from_tables(tables(corpus, {}))
    dataset = Dataset.open(config.data, config.train.seed)
    found = []
    for step in range(config.train.steps):
        positions = np.arange(8, dtype=np.int64) + 8 * step
        sources, samples, _ = dataset.order.at(positions)
        sequences = [
            dataset.streams[s].tokens.read(24 * k, 24).tolist()
            for s, k in zip(sources, samples.tolist(), strict=True)
        ]
        total = sum(
            zlib.crc32(b"".join(token.to_bytes(8, "little") for token in sequence)) for sequence in sequences
        )
        found.append(f"{total:014x}")
    return found


def test_one_devices_checksums_are_those_of_the_files_tokens_and_differ_from_step_to_step(
    corpus: str,
) -> None:
    found = [step.data for step in on_one_device(tables(corpus, {})).steps]
    assert found == expected(corpus)
    assert len(set(found)) == len(found) == 3


@pytest.mark.full  # tests/parallel holds the checksums of every layout it trains against one device's
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_checksums_of_one_device(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int]
) -> None:
    job_of_layout = tables(corpus, layout)
    world = from_tables(job_of_layout).layout.world
    for found in ranks(world).run(train, job_of_layout):
        assert [step.data for step in found.steps] == expected(corpus)


def test_a_sequence_repeated_or_exchanged_is_seen_and_the_order_of_sequences_is_not() -> None:
    rows = np.random.default_rng(0).integers(0, 50_000, (6, 32))
    true = checksum(rows)
    assert checksum(rows[::-1]) == true
    assert checksum(rows[:2]) + checksum(rows[2:]) == true
    assert checksum(rows.astype(np.int32)) == true
    assert checksum(rows[[0, 1, 2, 3, 4, 4]]) != true
    changed = rows.copy()
    changed[3, 31] += 1
    assert checksum(changed) != true
    assert checksum(rows[:, ::-1]) != true


def test_batches_carry_the_checksum_of_their_own_rows(corpus: str) -> None:
    config = from_tables(tables(corpus, {}))
    dataset = Dataset.open(config.data, config.train.seed)
    with Batches(dataset, 8, range(2, 6), 2, "cpu") as batches:
        found = [batch.checksum for batch in next(batches)]
    rows = dataset.sequences(0, 8).inputs
    assert found == [checksum(rows[2:4]), checksum(rows[4:6])]
