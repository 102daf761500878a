"""Weights with requires_grad=False: held and sharded like others, and never trained, on any layout and by any
driver.

That the others train as in a plain torch loop is seen in test_own_module.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, put_together, start, weights
from ranks.pool import Pool
from test_own_module import STEPS, Tables, own, plain_module, tables_of
from torch import Tensor

from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config import Config, Layout, from_tables
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.search.planner import Planner
from shardwise.train.build import build, restore, save
from shardwise.train.check_module import check_module
from shardwise.train.steps import steps

Weights = dict[str, Tensor]
Bytes = dict[str, int]


def first_values(tables: Tables) -> tuple[Weights, set[str]]:
    """Of all weights, as their author has them, and the names of those that are frozen."""
    module = plain_module(from_tables(tables))
    values = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return values, {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def trained(worker: Worker, tables: Tables) -> tuple[Weights, set[str], set[str], Bytes]:
    """What a run came to: its weights, and on this rank the names of those with moments and with residuals,
    and the bytes of the last step by kind of collective."""
    training = start(worker, tables)
    done = list(steps(training))
    moved = {
        name
        for name, parameter in training.parallel.named_parameters()
        if parameter in training.optimizer.state
    }
    kept = {key.name for key, _ in training.parallel.residuals()}
    sent: Bytes = {}
    for key, counted in done[-1].collectives.items():
        kind = key.split("/")[0]
        sent[kind] = sent.get(kind, 0) + counted["bytes"]
    return weights(training), moved, kept, sent


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 0},
        {"data": 2, "zero": 2},
        pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.full),
        pytest.param({"data": 2, "replica": 2, "zero": 1}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "tensor": 2, "schedule": "zbv"}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "schedule": "zb1p"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_frozen_weights_keep_their_bits_and_have_neither_moments_nor_sums(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]
) -> None:
    tables = tables_of(corpus, own("Tuned"), layout)
    first, frozen = first_values(tables)
    for found, moved, _, sent in ranks(Layout(**tables["layout"]).world).run(trained, tables):
        assert all(torch.equal(found[name], first[name]) for name in frozen)
        assert not any(torch.equal(found[name], first[name]) for name in first.keys() - frozen)
        assert not moved & frozen
        if layout == {"data": 2, "zero": 2}:
            # A row that two devices share is padded to two; each of the two micro-batches is summed, in
            # float64.
            padded = [
                -(-len(first[name]) // 2) * 2 * prod(first[name].shape[1:]) for name in first.keys() - frozen
            ]
            assert sent["reduce_scatter"] == 2 * 8 * sum(padded)


def test_of_frozen_weights_no_gradient_is_summed(ranks: Callable[[int], Pool], corpus: str) -> None:
    """The same module with all weights trained sends just as many bytes more as the frozen ones have."""
    sums = {}
    for name in ("Tuned", "Headed"):
        _, _, _, sent = ranks(2).run(trained, tables_of(corpus, own(name), {"data": 2, "zero": 0}))[0]
        sums[name] = sent["all_reduce"]
    sizes = {
        name: value.numel() for name, value in first_values(tables_of(corpus, own("Tuned"), {}))[0].items()
    }
    assert sums["Tuned"] - sums["Headed"] == 8 * sum(
        size for name, size in sizes.items() if "norm" in name or "mix.q" in name
    )


@pytest.mark.parametrize("zero", [0, 2])
def test_compression_leaves_nothing_of_frozen_weights(
    ranks: Callable[[int], Pool], corpus: str, zero: int
) -> None:
    layout = {"data": 2, "zero": zero, "compression": "topk(0.1)", "compression_warmup": 0}
    tables = tables_of(corpus, own("Tuned"), layout)
    tables["model"] |= {"hidden": 72, "heads": 12}  # matrices large enough to be compressed
    first, frozen = first_values(tables)
    for found, _, kept, _ in ranks(2).run(trained, tables):
        assert all(torch.equal(found[name], first[name]) for name in frozen)
        assert any("mix.q.weight" in name for name in kept)
        assert not kept & frozen


def test_frozen_weights_stored_in_16_bits_are_not_rounded_again(corpus: str) -> None:
    tables = tables_of(corpus, own("Tuned"), {}, precision="bfloat16", state_dtype="bfloat16")
    first, frozen = first_values(tables)
    found, moved, _, _ = trained(ALONE, tables)
    assert all(torch.equal(found[name], first[name].bfloat16()) for name in frozen)
    assert moved == first.keys() - frozen


# -- checkpoints ---------------------------------------------------------------------------------------------


def saved(worker: Worker, tables: Tables, count: int) -> Weights:
    training = start(worker, tables)
    for _ in zip(range(count), steps(training), strict=False):
        pass
    save(training)
    return weights(training)


def gone_on(worker: Worker, tables: Tables, folder: str) -> tuple[Weights, Weights, Weights]:
    """The weights as they were loaded, with the first moments, and as they are after the last step."""
    training = start(worker, tables)
    restore(training, folder)
    loaded = weights(training)
    own_moments = {
        name: training.optimizer.state[parameter]["exp_avg"]
        for name, parameter in training.parallel.named_parameters()
        if parameter in training.optimizer.state
    }
    moments = put_together(own_moments, worker.world)
    list(steps(training))
    return loaded, moments, weights(training)


def test_frozen_weights_are_saved_without_moments_and_a_run_goes_on_to_the_bit(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = {**tables_of(corpus, own("Tuned"), {"tensor": 2}), "run": {"folder": str(tmp_path)}}
    last = ranks(2).run(saved, tables, STEPS)[0]
    ranks(2).run(saved, tables, 1)
    folder = str(tmp_path / "checkpoints" / "step-1")
    first, frozen = first_values(tables)
    keys = Contents.open(folder).tensors
    assert all(StateKey.model(name) in keys for name in first)
    moved = {name for name in first if StateKey.optimizer(name, "exp_avg") in keys}
    assert moved == first.keys() - frozen
    for loaded, moments, after in ranks(2).run(gone_on, tables, folder):
        assert all(torch.equal(loaded[name], first[name]) for name in frozen)
        assert not moments.keys() & frozen
        assert all(torch.equal(after[name], last[name]) for name in first)
    # On another layout, with more of the weights trained, those begin without moments; with fewer, moments
    # are left alone.
    (head,) = {name for name in first if name == "head.0.weight"}
    other = {
        **tables,
        "layout": {"data": 2, "zero": 3},
        "model": {**tables["model"], "module": own("Headed")},
    }
    for loaded, moments, after in ranks(2).run(gone_on, other, folder):
        assert all(torch.equal(loaded[name], after[name]) for name in first if not name.startswith("head"))
        assert moments.keys() == {"head.0.weight", "head.0.bias"}
        assert bool(moments[head].any())
    ranks(2).run(saved, other, STEPS)
    for _, moments, after in ranks(2).run(gone_on, {**tables, "train": {**tables["train"],
    "steps": STEPS + 1}},
                                          str(tmp_path / "checkpoints" / f"step-{STEPS}")):  # fmt: skip
        assert not moments["body.layers.0.mix.q.weight"].any()
        assert bool(moments[head].any())
        assert not torch.equal(after["body.layers.0.mix.q.weight"], first["body.layers.0.mix.q.weight"])


# -- drivers -------------------------------------------------------------------------------------------------


def test_one_worker_without_locks_is_one_device_to_the_bit(corpus: str) -> None:
    tables = tables_of(corpus, own("Headed"), {}, global_batch=4, micro_batch=4)
    training = start(ALONE, tables)
    list(steps(training))
    truth = weights(training)
    tables["train"] |= {"driver": "hogwild"}
    shared = start(ALONE, {**tables, "layout": {"data": 1}, "hogwild": {}})
    list(steps(shared))
    assert all(torch.equal(weight, truth[name]) for name, weight in weights(shared).items())
    _, frozen = first_values(tables)
    assert (
        not {
            name
            for name, parameter in shared.parallel.named_parameters()
            if parameter in shared.optimizer.state
        }
        & frozen
    )


def in_groups(worker: Worker, tables: Tables) -> Weights:
    config = from_tables(tables)
    training = build(config, Planner(config, worker.world, None).first, worker)
    list(steps(training))
    save(training)
    with torch.no_grad():
        for _, parameter in training.parallel.named_parameters():
            parameter.zero_()
    restore(training, str(Path(config.run.folder) / "checkpoints" / f"step-{STEPS}"))
    return {name: parameter.detach().clone() for name, parameter in training.parallel.named_parameters()}


def test_groups_that_train_by_themselves_leave_frozen_weights_alone(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = tables_of(corpus, own("Headed"), {"data": 1}, driver="local", check_every=0)
    tables |= {"local": {"groups": 2, "sync_every": 1}, "run": {"folder": str(tmp_path)}}
    first, frozen = first_values(tables)
    one, other = ranks(2).run(in_groups, tables)
    assert all(torch.equal(one[name], other[name]) for name in first)
    assert all(torch.equal(one[name], first[name]) for name in frozen)
    assert not any(torch.equal(one[name], first[name]) for name in first.keys() - frozen)


def test_servers_refuse_frozen_weights(corpus: str) -> None:
    tables = tables_of(corpus, own("Headed"), {}, driver="server")
    config: Config = from_tables({**tables, "server": {"servers": 1}})
    with pytest.raises(
        UserError, match=r"train.driver = 'server': Headed has frozen parameters \(body.words.weight\)"
    ):
        check_module(config, Layout(data=1))
