"""What rounding costs: below float64, several ranks differ from one by as much as the computing dtype rounds,
and no more.

The forward of a sequence does not depend on the other sequences, so the first loss is the same but for the
order of a float32 sum. Weight gradients are products over tokens that are rounded to the computing dtype once
a rank, so they differ by its unit roundoff u (2^-24, 2^-8, 2^-11), and the norm, which averages over
thousands of them, by a fraction: a quarter of u bounds it in 16 bits. Later losses are means over hundreds of
tokens of weights moved by such gradients: a sixteenth of u. In float32 the order of summation counts too;
there the bound is the 1e-5 that every layout of a float32 job has to keep.

All of that supposes that weights move in proportion to gradients. AdamW's first updates do not: with its
usual epsilon they are the signs of gradients, also of those that are nothing but rounding, so two runs of
equal exactness part by 30 times as much (in float16 by 1e-3 at the third norm, each 5e-4 from float64's, on
either side of it). An epsilon of the size of these gradients, 1e-3, makes updates proportional.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks.jobs import job, on_one_device, train
from ranks.pool import Pool


def largest(found: list[float], truth: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))


BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (2**-12, 2**-10), "float16": (2**-15, 2**-13)}
USUAL = [("float32", 3), *(("bfloat16", zero) for zero in (0, 2, 3))]


@pytest.mark.parametrize(
    ("precision", "loss_bound", "norm_bound", "zero"),
    [
        pytest.param(precision, *bounds, zero, marks=[] if (precision, zero) in USUAL else pytest.mark.full)
        for precision, bounds in BOUNDS.items()
        for zero in range(4)
    ],
)
def test_two_ranks_differ_from_one_by_rounding_only(
    ranks: Callable[[int], Pool], corpus: str, zero: int, precision: str, loss_bound: float, norm_bound: float
) -> None:
    tables = job(
        corpus,
        train={
            "precision": precision,
            "steps": 6,
            "initial_scale": 1024.0,
            "micro_batch": 4,
        },
        optimizer={"epsilon": 1e-3},
        layout={"data": 2, "zero": zero},
    )
    truth = on_one_device(tables)
    for found in ranks(2).run(train, tables):
        assert found.losses[0] == pytest.approx(truth.losses[0], rel=1e-6)
        assert largest(found.losses, truth.losses) < loss_bound
        assert largest(found.norms, truth.norms) < norm_bound
