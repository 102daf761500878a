"""A parameter server under an imagined clock: the same again from the same seed, and synchronous where
nothing may be stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, job, start
from torch import Tensor

from shardwise.drivers.contributions import steps_ahead
from shardwise.drivers.replay import Pace, Replay
from shardwise.train.build import Training
from shardwise.train.steps import StepRecord, steps

PACES = [Pace(), Pace(), Pace(losses=0.1), Pace(seconds=4.0)]


def replayed(
    corpus: str, server: dict[str, Any], seed: int = 0, count: int = 12
) -> tuple[list[StepRecord], Replay]:
    tables = job(corpus, model=FAMILIES["llama"], train={"steps": count, "driver": "server"})
    training = start(ALONE, {**tables, "server": {"portions": 4, **server}})
    source = Replay(training, PACES, seed)
    return list(steps(training, source=source)), source


def test_without_staleness_it_is_what_one_device_computes(corpus: str) -> None:
    training = start(ALONE, job(corpus, model=FAMILIES["llama"], train={"steps": 12}))
    alone = list(steps(training))
    done, _ = replayed(corpus, {"max_staleness": 0})
    assert [step.loss for step in done] == pytest.approx([step.loss for step in alone], rel=1e-12)
    assert [step.data for step in done] == [step.data for step in alone]


@pytest.mark.parametrize("bound", [1, 4, "unbounded"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(corpus: str, bound: int | str) -> None:
    server = {"max_staleness": bound, "portions": 2}
    (first, one), (again, two) = (replayed(corpus, server, seed=3) for _ in range(2))
    assert [(step.loss, step.staleness) for step in first] == [(step.loss, step.staleness) for step in again]
    assert one.clock == two.clock > 0
    other, _ = replayed(corpus, server, seed=4)
    assert [step.loss for step in other] != [step.loss for step in first]
    staleness = [each for step in first for each in step.staleness]
    assert max(staleness) > 0
    assert bound == "unbounded" or max(staleness) <= int(bound)


def test_nobody_waits_for_a_slow_worker_if_its_portion_is_computed_again(corpus: str) -> None:
    """Of four workers one is four times as slow: in lockstep all wait for it."""
    _, lockstep = replayed(corpus, {"max_staleness": 0})
    done, again = replayed(corpus, {"max_staleness": 0, "backups": True})
    assert again.clock < lockstep.clock / 1.5
    alone = [step.loss for step in replayed(corpus, {"max_staleness": 0})[0]]
    assert [step.loss for step in done] == alone, "who computes what changes no bit"
    _, unbounded = replayed(corpus, {"max_staleness": "unbounded"})
    assert unbounded.clock < lockstep.clock / 2


def test_stale_gradients_can_move_the_weights_less(corpus: str) -> None:
    plain, _ = replayed(corpus, {"max_staleness": "unbounded", "portions": 1})
    damped, _ = replayed(corpus, {"max_staleness": "unbounded", "portions": 1, "damping": True})
    assert [step.staleness for step in plain] == [step.staleness for step in damped]
    stale = next(index for index, step in enumerate(plain) if max(step.staleness) > 0)
    assert damped[stale].gradient_norm == plain[stale].gradient_norm, (
        "AdamW would not notice a smaller gradient"
    )
    assert damped[stale].learning_rate == pytest.approx(
        plain[stale].learning_rate / (1 + plain[stale].staleness[0]), rel=1e-9
    )


def test_workers_get_weights_as_they_will_be_when_their_gradients_come(corpus: str) -> None:
    """Moved on by AdamW's momentum: the last change, times the sum of as many powers of beta1 as gradients
    are old."""
    tables = job(corpus, model=FAMILIES["llama"], train={"steps": 8, "driver": "server"})
    training = start(ALONE, {**tables, "server": {"portions": 1, "max_staleness": "unbounded"}})
    source = Replay(training, [Pace(spread=0.0)] * 3, seed=0)
    before, age, beta = weights_of(training), 0.0, training.config.optimizer.momentum_per_step
    for step in steps(training, source=source):
        now = weights_of(training)
        age += 0.1 * (step.staleness[0] - age)
        ahead = beta * (1 - beta**age) / (1 - beta)
        handed_out = source.store.weights(step.step)[1]
        torch.testing.assert_close(handed_out, now + ahead * (now - before), rtol=1e-12, atol=1e-12)
        before = now
    assert age > 0.5
    assert steps_ahead(2, beta) == pytest.approx(beta + beta**2)


def weights_of(training: Training) -> Tensor:
    return torch.cat(
        [parameter.detach().reshape(-1).clone() for _, parameter in training.parallel.named_parameters()]
    )
