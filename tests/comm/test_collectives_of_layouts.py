"""The ledger of a step equals the table in shardwise/parallel/data.py, to the byte and the call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
from ranks.jobs import GPT, LLAMA, job, train
from ranks.pool import Pool

from shardwise.config import Model
from shardwise.config.parameters import parameter_shapes

EVEN = {"layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 32, "vocabulary": 260}
Ledger = dict[str, dict[str, int]]


def unit_sizes(model: dict[str, Any], shards: int) -> tuple[list[int], int]:
    """Elements of each unit but the root, and of the root: what is left beside blocks and an untied
    embedding.

    Rows that do not divide are padded until they do.
    """
    shapes = parameter_shapes(Model(**model))
    padded = {name: -(-shape[0] // shards) * shards * prod(shape[1:]) for name, shape in shapes.items()}
    blocks = [
        sum(size for name, size in padded.items() if name.startswith(f"blocks.{i}."))
        for i in range(model["layers"])
    ]
    embedding = [] if model.get("tied") else [padded["embedding.weight"]]
    units = blocks + embedding
    return units, sum(padded.values()) - sum(units)


def expected(model: dict[str, Any], zero: int, data: int, replica: int, micro_batches: int) -> Ledger:
    """bfloat16: weights are gathered in 2 bytes, gradients summed in 4."""
    units, root = unit_sizes(model, data if zero else 1)
    count, size = len(units) + 1, sum(units) + root
    # Loss, votes to stop, the two halves of the data's checksum, and two times of each rank, in float64.
    shared = 8 * (4 + 2 * data * replica)
    told = {"count": 1, "bytes": shared}
    ledger = {"all_reduce/data": told, **({"all_reduce/replica": told} if replica > 1 else {})}
    if zero == 0:
        axis = "data" if replica == 1 else "replica x data"
        before = ledger.get(f"all_reduce/{axis}", {"count": 0, "bytes": 0})
        return {
            **ledger,
            f"all_reduce/{axis}": {"count": before["count"] + 1, "bytes": before["bytes"] + 4 * size},
        }
    gathers = count if zero < 3 else micro_batches * (2 * count - 1)
    gathered = size if zero < 3 else micro_batches * (2 * size - root)
    scatters = 1 if zero == 1 else micro_batches
    ledger["all_reduce/data"] = {"count": 2, "bytes": shared + 4}  # and the sum of squares for the norm
    ledger["all_gather/data"] = {"count": gathers, "bytes": 2 * gathered}
    ledger["reduce_scatter/data"] = {"count": scatters * count, "bytes": scatters * 4 * size}
    if replica > 1:
        ledger["all_reduce/replica"] = {"count": 1 + count, "bytes": shared + 4 * size // data}
    return ledger


MODELS = {
    "even-4": (EVEN, 4, 1),
    "odd-tied-2x2": (GPT, 2, 2),
    "odd-4": (LLAMA, 4, 1),
    "odd-tied-2": (GPT, 2, 1),
    "even-2x2": (EVEN, 2, 2),
}


def usual(name: str, zero: int, micro_batches: int) -> bool:
    """What is tried each time: two models that have between them every stage with one micro-batch and with
    two."""
    return name == ("odd-tied-2x2" if (zero + micro_batches) % 2 else "even-4")


@pytest.mark.parametrize(
    ("model", "data", "replica", "zero", "micro_batches"),
    [
        pytest.param(
            *MODELS[name],
            *row,
            id="-".join(map(str, (name, *row))),
            marks=[] if usual(name, *row) else pytest.mark.full,
        )
        for name, *row in product(MODELS, range(4), (1, 2))
    ],
)
def test_a_step_moves_what_its_zero_stage_says(
    ranks: Callable[[int], Pool],
    corpus: str,
    model: dict[str, Any],
    data: int,
    replica: int,
    zero: int,
    micro_batches: int,
) -> None:
    tables = job(
        corpus,
        model=model,
        train={"precision": "bfloat16", "steps": 2, "micro_batch": 8 // (data * replica * micro_batches)},
        layout={"data": data, "replica": replica, "zero": zero},
    )
    truth = expected(model, zero, data, replica, micro_batches)
    for found in ranks(data * replica).run(train, tables):
        assert [step.collectives for step in found.steps] == [truth] * 2


def test_padding_is_none_where_rows_divide_and_known_where_they_do_not() -> None:
    units, root = unit_sizes(EVEN, 4)
    assert sum(units) + root == 2 * 260 * 16 + 16 + 3 * (2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 32 * 16)
    assert root == 260 * 16 + 16
    assert unit_sizes(LLAMA, 4)[1] == 260 * 18 + 20  # 259 rows become 260, a norm of 18 becomes 20
