"""The global norm against torch's, on the whole gradients, whatever the sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, Tables, job, put_together, start
from ranks.pool import Pool

from shardwise.mesh import Worker
from shardwise.optim import first_non_finite, global_norm, local, sharded_axes
from shardwise.train.sources import count_tokens, forward_backward


def norms(worker: Worker, tables: Tables) -> tuple[float, float, set[tuple[str, ...]]]:
    """Ours over the shards, torch's over the whole gradients put together, and the axes gradients are sharded
    over."""
    from shardwise.data.batches import Batches

    training = start(worker, tables)
    rows = training.shares.of(training.mesh.data_index)
    with Batches(
        training.dataset, training.config.train.global_batch, rows, training.plan.accumulation, "cpu"
    ) as batches:
        batch = next(batches)
    forward_backward(training, batch, count_tokens(training, batch))
    parameters = list(training.parallel.model.parameters())
    own = {str(index): parameter.grad for index, parameter in enumerate(parameters)}
    gradients = put_together(own, worker.world).values()
    axes = {sharded_axes(parameter.grad) for parameter in parameters}
    return (
        float(global_norm(parameters, training.comm)),
        float(torch.nn.utils.get_total_norm(gradients)),
        axes,
    )


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({"data": 4, "zero": 0}, ()),
        ({"data": 4, "zero": 1}, ("data",)),
        ({"data": 4, "zero": 3}, ("data",)),
        ({"replica": 2, "data": 2, "zero": 2}, ("data",)),
        ({"replica": 4, "data": 1}, ()),
    ],
    ids=str,
)
def test_the_norm_over_shards_is_torchs_over_whole_gradients(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any], axes: tuple[str, ...]
) -> None:
    found = ranks(4).run(norms, job(corpus, layout=layout))
    assert len({ours for ours, _, _ in found}) == 1, "every rank must know the same norm"
    for ours, torchs, sharded in found:
        assert ours == pytest.approx(torchs, rel=1e-13)
        assert sharded == {axes}


def test_the_norm_is_summed_in_float32_or_better(corpus: str) -> None:
    training = start(ALONE, job(corpus, train={"precision": "float32"}))
    parameters = [torch.nn.Parameter(torch.empty(100_000, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1 / 256)  # squares summed in bfloat16 would stop at 1/256
    assert float(global_norm(parameters, training.comm)) == pytest.approx(300_000**0.5 / 256, rel=1e-5)


def test_parameters_without_a_gradient_take_no_part(corpus: str) -> None:
    training = start(ALONE, job(corpus))
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    parameters[1].grad = torch.tensor([1.0, 2.0, 2.0, 4.0])
    assert float(global_norm(parameters, training.comm)) == 5.0
    assert float(global_norm(parameters[:1], training.comm)) == 0.0


def test_the_first_bad_gradient_is_named_in_model_order() -> None:
    named = [(name, torch.nn.Parameter(torch.zeros(2))) for name in ("first", "second", "third")]
    assert first_non_finite(named) is None
    named[0][1].grad = torch.zeros(2)
    named[2][1].grad = torch.tensor([0.0, torch.inf])
    assert first_non_finite(named) == "third"
    named[1][1].grad = torch.tensor([torch.nan, 0.0])
    assert first_non_finite(named) == "second"
    assert local(named[0][1]) is named[0][1]
