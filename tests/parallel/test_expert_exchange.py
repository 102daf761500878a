"""Experts on several devices against all of them on one, in float64: outputs, and gradients of rows and
weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks.pool import Pool
from torch import Tensor

from shardwise.comm import Comm
from shardwise.config import Layout, Model
from shardwise.mesh import Worker, join
from shardwise.models.experts import MixtureOfExperts, apply_experts
from shardwise.models.sharding import Sharding, experts
from shardwise.optim import local
from shardwise.parallel.expert import exchange, split_over_experts

HIDDEN, WIDTH, EXPERTS = 6, 10, 8
MODEL = Model(hidden=HIDDEN, expert_ffn=WIDTH, experts=EXPERTS, experts_per_token=2, shared_experts=1,
balance_loss=0.2,
              router_z_loss=0.01)  # fmt: skip


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def rows_and_upstream(rank: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + rank)
    rows, upstream = (torch.randn(sum(counts), HIDDEN, dtype=torch.float64) for _ in range(2))
    return rows, upstream


def exchanged(worker: Worker, counts: list[list[int]]) -> dict[str, Any]:
    """One rank's part: its own rows, its own experts."""
    mesh = join(worker, Layout(data=worker.world, expert=worker.world))
    comm = Comm(mesh)
    own = EXPERTS // worker.world
    mine = [weight[worker.rank * own :][:own].clone().requires_grad_() for weight in weights()]
    rows, upstream = rows_and_upstream(worker.rank, counts[worker.rank])
    rows.requires_grad_()
    result = exchange(
        lambda rows, counts: apply_experts(rows, counts, *mine), rows, torch.tensor(counts[worker.rank]), comm
    )
    gradients = torch.autograd.grad(result, [rows, *mine], upstream)
    return {"result": result.detach(), "gradients": gradients, "ledger": comm.ledger.take()}


def routings(world: int) -> dict[str, list[list[int]]]:
    """Rows of each expert on each rank."""
    random = torch.randint(0, 5, (world, EXPERTS), generator=torch.Generator().manual_seed(world)).tolist()
    return {
        "random": random,
        "empty-experts": [[count if expert % 3 else 0 for expert, count in enumerate(row)] for row in random],
        "all-on-one": [[0] * (EXPERTS - 1) + [rank + 2] for rank in range(world)],
        "a-rank-without-rows": [[0] * EXPERTS, *random[1:]],
        "no-rows-at-all": [[0] * EXPERTS] * world,
    }


@pytest.mark.parametrize(
    "routing", ["random", "empty-experts", "all-on-one", "a-rank-without-rows", "no-rows-at-all"]
)
@pytest.mark.parametrize("world", [2, 4])
def test_the_exchange_equals_all_experts_on_one_device(
    ranks: Callable[[int], Pool], world: int, routing: str
) -> None:
    counts = routings(world)[routing]
    found = ranks(world).run(exchanged, counts)
    full, summed = (
        [weight.requires_grad_() for weight in weights()],
        [torch.zeros_like(weight) for weight in weights()],
    )
    for rank, part in enumerate(found):
        rows, upstream = rows_and_upstream(rank, counts[rank])
        truth = apply_experts(rows.requires_grad_(), torch.tensor(counts[rank]), *full)
        rows_gradient, *weight_gradients = torch.autograd.grad(truth, [rows, *full], upstream)
        torch.testing.assert_close(part["result"], truth.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part["gradients"][0], rows_gradient, rtol=1e-12, atol=1e-12)
        summed = [total + gradient for total, gradient in zip(summed, weight_gradients, strict=True)]
    for index, total in enumerate(summed, start=1):
        joined = torch.cat([part["gradients"][index] for part in found])
        torch.testing.assert_close(joined, total, rtol=1e-12, atol=1e-12)


def test_the_ledger_holds_the_counts_and_each_row_four_times(ranks: Callable[[int], Pool]) -> None:
    counts = routings(2)["random"]
    received = [sum(sum(row[4 * rank : 4 * rank + 4]) for row in counts) for rank in range(2)]
    for rank, part in enumerate(ranks(2).run(exchanged, counts)):
        moved = 2 * (sum(counts[rank]) + received[rank]) * HIDDEN * 8  # out and back, forward and backward
        assert part["ledger"] == {"all_to_all/expert": {"count": 5, "bytes": EXPERTS * 8 + moved}}


# The whole block


def block() -> tuple[MixtureOfExperts, Tensor]:
    torch.manual_seed(7)
    module = MixtureOfExperts(MODEL).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, torch.randn(4, 8, HIDDEN, dtype=torch.float64)


def in_parallel(worker: Worker, layout: dict[str, int]) -> dict[str, Tensor]:
    """This rank's sequences (data), and its part of each (context and tensor), through its experts."""
    mesh = join(worker, Layout(**layout))
    module, x = block()
    module.gradient_scale = 0.5
    split_over_experts(module, Sharding({"experts": experts()}), Comm(mesh))
    x = x.chunk(mesh.size("data"))[mesh.coordinate("data")]
    x = (
        x.chunk(mesh.size("context x tensor"), dim=1)[mesh.coordinate("context x tensor")]
        .clone()
        .requires_grad_()
    )
    y = module(x)
    y.square().sum().backward()
    gradients = {name: local(parameter.grad) for name, parameter in module.named_parameters()}
    return {
        **gradients,
        "y": y.detach(),
        "x": x.grad,
        "load": module.take_load(),
        "expert": mesh.coordinate("expert"),
    }


LAYOUTS = [{"data": 2, "expert": 2}, {"data": 1, "context": 2, "expert": 2}, {"data": 2, "context": 2,
"expert": 4},
           {"data": 2, "context": 1, "tensor": 2, "expert": 2}, {"data": 4, "expert": 2}]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_with_its_balancing_losses_computes_what_one_device_does(
    ranks: Callable[[int], Pool], layout: dict[str, int]
) -> None:
    world = Layout(**layout).world
    found = ranks(world).run(in_parallel, layout)
    module, x = block()
    module.gradient_scale = 0.5
    y = module(x.requires_grad_())
    y.square().sum().backward()
    per_sequence = world // layout["data"]
    for name, truth in (("y", y.detach()), ("x", x.grad)):
        parts = [torch.cat([part[name] for part in found[start : start + per_sequence]], dim=1)
                 for start in range(0, world, per_sequence)]  # fmt: skip
        torch.testing.assert_close(torch.cat(parts), truth, rtol=1e-12, atol=1e-12)
    assert torch.equal(sum(part["load"] for part in found), module.take_load())
    for name, parameter in module.named_parameters():
        if name.startswith("experts."):
            own = [
                [part[name] for part in found if part["expert"] == index] for index in range(layout["expert"])
            ]
            total = torch.cat([torch.stack(copies).sum(0) for copies in own])
        else:
            total = torch.stack([part[name] for part in found]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-12, atol=1e-12)
