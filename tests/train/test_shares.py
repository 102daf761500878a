"""Shares of the batch by speed: how rows are dealt out, and that the gradient is that of the even split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks.jobs import FAMILIES, Tables, job, put_together, start
from ranks.pool import Pool

from shardwise.config import Layout
from shardwise.config.read import from_tables
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.train.shares import MOST, WARM_UP, Dealer, RowShares, shares_by_speed
from shardwise.train.steps import StepRecord, steps


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 4))
def test_every_row_is_dealt_out_and_no_single_move_helps(speeds: list[float], rows: int, least: int) -> None:
    speed, total = np.array(speeds), len(speeds) * max(rows, least)
    dealt = np.array(shares_by_speed(total, speed, least).rows)
    assert dealt.sum() == total
    assert dealt.min() >= least
    assert dealt.max() <= MOST * max(rows, least)
    slowest = (dealt / speed).max()
    for giver in np.flatnonzero(dealt > least):
        for taker in np.flatnonzero(dealt < MOST * max(rows, least)):
            moved = dealt.copy()
            moved[giver] -= 1
            moved[taker] += 1
            assert (moved / speed).max() >= slowest * (1 - 1e-12)


def dealer(world: int, rows: int, **layout: int) -> Dealer:
    degrees = Layout.model_validate({"data": world, **layout})
    return Dealer(RowShares.even(rows, degrees.data_parallel), degrees, 1, 0, by_speed=True)


def test_shares_follow_a_device_that_changes_its_speed() -> None:
    """Four devices of speed one row a second; one becomes four times slower, and later recovers."""
    dealing, speeds, seen = dealer(4, 52), np.ones(4), []
    for step in range(1, 61):
        speeds[2] = 0.25 if 20 <= step < 40 else 1.0
        rows = np.array(dealing.deal().rows)
        seen.append(rows)
        dealing.note_seconds(step, [(seconds, 0.0) for seconds in rows / speeds])
    assert all(rows.sum() == 52 for rows in seen)
    assert seen[18].tolist() == [13] * 4
    assert seen[38].tolist() == [16, 16, 4, 16]
    assert max(seen[59]) - min(seen[59]) <= 1
    assert max(abs(before - after).max() for before, after in itertools.pairwise(seen)) <= 6, (
        "it moves smoothly"
    )


def test_one_slow_step_in_many_moves_few_rows_and_unknown_times_move_none() -> None:
    dealing = dealer(2, 64)
    for step in range(1, 30):
        rows = dealing.deal().rows
        slow = 3.0 if step == 15 else 1.0
        dealing.note_seconds(step, [(rows[0] * slow, 0.0), (rows[1] * 1.0, 0.0)])
        assert abs(rows[0] - 32) <= 6
    blind = dealer(2, 64)
    for step in range(1, 10):
        blind.deal()
        blind.note_seconds(step, [(0.0, 1.0), (0.0, 9.0)])
    assert blind.deal().rows == (32, 32)


def test_a_group_of_tensor_devices_is_as_slow_as_its_slowest() -> None:
    dealing = dealer(2, 8, tensor=2)
    for step in range(1, 20 + WARM_UP):
        rows = dealing.deal().rows
        dealing.note_seconds(
            step, [(rows[0] * 0.1, 0.0), (rows[0] * 1.0, 0.0), (rows[1] * 3.0, 0.0), (rows[1] * 1.0, 0.0)]
        )
    assert dealing.deal().rows == (6, 2)


TRAIN = {"steps": 3, "global_batch": 16, "micro_batch": 2, "precision": "float64"}


def gradients(
    worker: Worker, tables: Tables, rows: tuple[int, ...] | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The first step's gradients put together, and the data of all steps, with the shares of the devices
    given."""
    training = start(worker, tables)
    training.shares = RowShares(rows) if rows else training.shares
    kept: dict[str, torch.Tensor] = {}
    original = training.parallel.forward_backward

    def keeping(*arguments: Any) -> Any:
        loss = original(*arguments)
        if not kept:
            own = {name: parameter.grad.clone() for name, parameter in training.parallel.named_parameters()}
            kept.update(put_together(own, worker.world))
        return loss

    training.parallel.forward_backward = keeping  # type: ignore[method-assign]
    return kept, [done.data for done in steps(training)]


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 0},
        {"data": 2, "zero": 2},
        pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.full),
    ],
    ids=lambda layout: f"zero{layout['zero']}",
)
@pytest.mark.parametrize("family", ["llama", pytest.param("experts", marks=pytest.mark.full)])
def test_the_gradient_of_uneven_shares_is_that_of_the_even_split(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int], family: str
) -> None:
    tables = job(corpus, model=FAMILIES[family], train=TRAIN, layout=layout)
    (even, data), *_ = ranks(2).run(gradients, tables, None)
    (uneven, same_data), *_ = ranks(2).run(gradients, tables, (11, 5))
    assert same_data == data
    for name, gradient in even.items():
        assert float((uneven[name] - gradient).norm()) <= 1e-9 * float(gradient.norm()), name


def with_a_slow_rank(worker: Worker, tables: Tables) -> list[StepRecord]:
    """Rank 1 believes that each of its rows takes very long."""
    training = start(worker, tables)
    clock, finish = training.comm.clock, training.comm.clock.finish
    last: list[StepRecord] = []

    def lying() -> dict[str, float]:
        split, rows = finish(), (last[-1].rows[worker.rank] if last else 8)
        seconds = rows * (400.0 if worker.rank else 100.0)
        return {**split, "forward_backward": seconds, "total": seconds}

    clock.finish = lying  # type: ignore[method-assign]
    for done in steps(training):
        last.append(done)
    return last


def test_a_run_deals_by_speed_and_reads_what_an_even_one_reads(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    train = {**TRAIN, "steps": 14, "micro_batch": 4}
    even = job(corpus, model=FAMILIES["llama"], train=train, layout={"data": 2, "zero": 0})
    by_speed = job(
        corpus, model=FAMILIES["llama"], train={**train, "driver": "by-speed"}, layout={"data": 2, "zero": 0}
    )
    plain = ranks(2).run(with_plain_steps, even)[0]
    main, other = ranks(2).run(with_a_slow_rank, by_speed)
    assert [done.rows for done in main] == [done.rows for done in other]
    assert main[0].rows == (8, 8)
    assert main[-1].rows[0] >= 12
    assert [done.data for done in main] == [data for data, _ in plain]
    assert [done.loss for done in main] == pytest.approx([loss for _, loss in plain], rel=1e-9)
    assert main[3].load_imbalance is not None
    assert main[3].load_imbalance > 1


def with_plain_steps(worker: Worker, tables: Tables) -> list[tuple[str, float]]:
    return [(done.data, done.loss) for done in steps(start(worker, tables))]


def test_pipelines_are_refused(corpus: str) -> None:
    tables = job(
        corpus,
        model=FAMILIES["llama"],
        train={**TRAIN, "driver": "by-speed"},
        layout={"pipeline": 2, "data": 1},
    )
    refused = r"train.driver = 'by-speed': not with layout.pipeline = 2, because the stages"
    with pytest.raises(UserError, match=refused):
        from_tables(tables)
