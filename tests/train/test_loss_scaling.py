"""float16: an overflow skips exactly its step, on all ranks, and costs half the scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from ranks.faults import Taken, skip
from ranks.jobs import ALONE, Tables, job, on_one_device
from ranks.pool import Pool

from shardwise.errors import RunFailed


def float16(corpus: str, layout: dict[str, Any] | None = None, **train: Any) -> Tables:
    base = {"precision": "float16", "initial_scale": 1024.0, "scale_every": 2, "steps": 6, "warmup": 0}
    return job(corpus, train={**base, **train}, layout=layout or {})


def check_only_step_three_was_skipped(taken: list[Taken]) -> None:
    assert [one.step.skipped for one in taken] == [False, False, True, False, False, False]
    assert [one.changed for one in taken] == [{"model", "optimizer"}] * 2 + [set()] + [
        {"model", "optimizer"}
    ] * 3
    assert [one.adam_steps for one in taken] == [{1.0}, {2.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    # Doubled after two clean steps, halved by the overflow, doubled after the next two.
    assert [one.step.loss_scale for one in taken] == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert not math.isfinite(taken[2].step.gradient_norm)
    assert all(math.isfinite(one.step.gradient_norm) for one in taken if not one.step.skipped)
    assert all(math.isfinite(one.step.loss) for one in taken)


def test_an_overflow_skips_exactly_its_step_and_halves_the_scale(corpus: str) -> None:
    check_only_step_three_was_skipped(skip(ALONE, float16(corpus), 3, 0))


@pytest.mark.parametrize("zero", [0, *(pytest.param(zero, marks=pytest.mark.full) for zero in (1, 2)), 3])
def test_all_ranks_skip_where_one_overflows(ranks: Callable[[int], Pool], corpus: str, zero: int) -> None:
    tables = float16(corpus, {"data": 2, "zero": zero}, micro_batch=2)
    for taken in ranks(2).run(skip, tables, 3, 1):
        check_only_step_three_was_skipped(taken)


def test_a_scale_too_large_for_the_model_is_halved_until_it_fits(corpus: str) -> None:
    done = on_one_device(float16(corpus, initial_scale=2.0**30, scale_every=100, steps=24)).steps
    skipped = [step.skipped for step in done]
    assert skipped[0]
    assert not skipped[-1]
    assert [step.loss_scale for step in done] == [2.0 ** (30 - sum(skipped[:step])) for step in range(24)]
    assert done[-1].loss < done[0].loss


def test_the_scale_does_not_change_what_is_trained(corpus: str) -> None:
    small, large = (
        on_one_device(float16(corpus, initial_scale=scale, scale_every=100)) for scale in (64.0, 4096.0)
    )
    # Scaling by a power of two is exact but for gradients that leave float16's range at the lower end.
    assert small.losses == pytest.approx(large.losses, rel=2**-11)
    assert small.norms == pytest.approx(large.norms, rel=2**-9)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_the_other_precisions_have_no_scale(corpus: str, precision: str) -> None:
    done = on_one_device(float16(corpus, precision=precision, steps=3)).steps
    assert [(step.loss_scale, step.skipped) for step in done] == [(1.0, False)] * 3


def test_a_loss_that_is_not_finite_stops_a_float16_run_as_any_other(corpus: str) -> None:
    """The loss is not scaled, so no smaller scale can mend it."""
    with pytest.raises(RunFailed, match="the loss is nan"):
        on_one_device(float16(corpus, learning_rate=1e4, clip=False, steps=60))
