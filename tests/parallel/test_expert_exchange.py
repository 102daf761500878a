"""Experts on several devices against all of them on one, in float64: outputs, and gradients of rows and
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


SIGMOID = {"router": "sigmoid", "balance_bias": 0.1, "routing_scale": 2.5, "normalise_routing": False}


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts, with its losses, and what its router prefers."""

    fields: dict[str, Any] = field(default_factory=dict)
    preferred: tuple[int, ...] = ()
    """Experts that every token chooses, if it chooses as many."""

    def make(self) -> tuple[MixtureOfExperts, Tensor]:
        """The block, and its input on one device."""
        torch.manual_seed(7)
        module = MixtureOfExperts(MODEL.model_copy(update=self.fields)).double()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        if module.router.bias is not None:
            module.router.bias = torch.linspace(-0.2, 0.2, module.config.experts)
            module.router.bias[list(self.preferred)] += 9.0
        module.gradient_scale = 0.5
        return module, torch.randn(4, 8, HIDDEN, dtype=torch.float64)


def in_parallel(worker: Worker, layout: dict[str, int], mixture: Mixture) -> dict[str, Any]:
    """This rank's sequences (data), and its part of each (context and tensor), through its experts."""
    mesh = join(worker, Layout(**layout))
    comm = Comm(mesh)
    module, x = mixture.make()
    split_over_experts(module, Sharding({"experts": experts()}), comm)
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
        "ledger": comm.ledger.take(),
    }


def compare_with_one_device(found: list[dict[str, Any]], layout: dict[str, int], mixture: Mixture) -> None:
    module, x = mixture.make()
    y = module(x.requires_grad_())
    y.square().sum().backward()
    per_sequence = len(found) // layout["data"]
    for name, truth in (("y", y.detach()), ("x", x.grad)):
        parts = [torch.cat([part[name] for part in found[start : start + per_sequence]], dim=1)
                 for start in range(0, len(found), per_sequence)]  # fmt: skip
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


LAYOUTS = [{"data": 2, "expert": 2}, {"data": 1, "context": 2, "expert": 2}, {"data": 2, "context": 2,
"expert": 4},
           {"data": 2, "context": 1, "tensor": 2, "expert": 2}, {"data": 4, "expert": 2}]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_with_its_balancing_losses_computes_what_one_device_does(
    ranks: Callable[[int], Pool], layout: dict[str, int]
) -> None:
    found = ranks(Layout(**layout).world).run(in_parallel, layout, Mixture())
    compare_with_one_device(found, layout, Mixture())


MIXTURES = {
    "one of 8": Mixture({"experts_per_token": 1, "normalise_routing": False}),
    "2 of 12, sigmoid": Mixture({**SIGMOID, "experts": 12}),
    "4 of 16": Mixture({"experts": 16, "experts_per_token": 4, "shared_experts": 0}),
    "8 of 8": Mixture({"experts_per_token": 8}),
    "8 of 16, sigmoid": Mixture({**SIGMOID, "experts": 16, "experts_per_token": 8}),
    "all on the first device": Mixture({**SIGMOID}, preferred=(0, 1)),
    "none on the first device": Mixture({**SIGMOID, "experts_per_token": 4}, preferred=(4, 5, 6, 7)),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("devices", [2, 4])
def test_any_routing_gives_what_one_device_gives_and_the_same_bits_again(
    ranks: Callable[[int], Pool], devices: int, name: str
) -> None:
    layout, mixture = {"data": devices, "expert": devices}, MIXTURES[name]
    found, again = (ranks(devices).run(in_parallel, layout, mixture) for _ in range(2))
    compare_with_one_device(found, layout, mixture)
    for first, second in zip(found, again, strict=True):
        for key, value in first.items():
            assert torch.equal(value, second[key]) if isinstance(value, Tensor) else value == second[key]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_row_goes_once_to_each_device_with_experts_for_it(
    ranks: Callable[[int], Pool], devices: int, name: str
) -> None:
    """By hand, from the router's choices: rows and their sums, three numbers a choice, two a device."""
    mixture = MIXTURES[name]
    module, x = mixture.make()
    parts = [module.router(part.flatten(0, 1)).experts.tolist() for part in x.chunk(devices)]
    per_device = module.config.experts // devices
    rows = [[0] * devices for _ in parts]  # from each device to each
    choices = [[0] * devices for _ in parts]
    for source, tokens in enumerate(parts):
        for chosen in tokens:
            for device in range(devices):
                there = [expert for expert in chosen if expert // per_device == device]
                rows[source][device] += bool(there)
                choices[source][device] += len(there)
    found = ranks(devices).run(in_parallel, {"data": devices, "expert": devices}, mixture)
    for rank, part in enumerate(found):
        moved_rows = sum(rows[rank]) + sum(line[rank] for line in rows)  # there and back
        moved_choices = sum(choices[rank]) + sum(line[rank] for line in choices)  # and their gradients
        size = 16 * devices + 8 * (2 * HIDDEN * moved_rows + 3 * moved_choices)
        assert part["ledger"]["all_to_all/expert"] == {"count": 7, "bytes": size}
