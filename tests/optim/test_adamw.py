from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ranks.jobs import GPT, LLAMA
from ranks.pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.config import Layout, Model
from shardwise.mesh import Worker, join
from shardwise.models import Transformer, initialise
from shardwise.optim import make_optimizer, update
from shardwise.optimizers import AdamW
from shardwise.parallel.placement import local_slices

ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)

TABLES = ("embedding.weight", "positions.weight")
STEPS, LR = 3, 3e-4


def names_by_decay(model: nn.Module, settings: AdamW) -> dict[float, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model.named_parameters(), settings, embeddings=TABLES).param_groups
    return {group["weight_decay"]: {names[parameter] for parameter in group["params"]} for group in groups}


def test_a_llama_decays_its_matrices_and_its_head_only() -> None:
    with torch.device("meta"):
        found = names_by_decay(Transformer(Model(**{**LLAMA, "layers": 1})), AdamW(weight_decay=0.3))
    attention = {f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "output")}
    feed_forward = {f"blocks.0.feed_forward.{name}.weight" for name in ("gate", "up", "down")}
    head_norms = {f"blocks.0.attention.{name}_norm.weight" for name in ("query", "key")}
    norms = {"blocks.0.attention_norm.weight", "blocks.0.feed_forward_norm.weight", "norm.weight"}
    assert found == {
        0.3: attention | feed_forward | {"head.weight"},
        0.0: norms | head_norms | {"embedding.weight"},
    }


def test_a_tied_gpt_decays_neither_embeddings_nor_biases_nor_norms() -> None:
    with torch.device("meta"):
        model = Transformer(Model(**GPT))
    found = names_by_decay(model, AdamW(weight_decay=0.3))
    assert all(
        name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name for name in found[0.3]
    )
    assert len(found[0.3]) == 2 * 6
    assert len(found[0.3]) + len(found[0.0]) == len(list(model.parameters()))


def test_every_parameter_is_in_exactly_one_group() -> None:
    with torch.device("meta"):
        model = Transformer(Model(**LLAMA))
    groups = make_optimizer(model.named_parameters(), AdamW(), embeddings=TABLES).param_groups
    listed = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))


def model_with_gradients(dtype: torch.dtype) -> Transformer:
    model = Transformer(Model(**{**LLAMA, "layers": 1})).to(dtype)
    initialise(model, 5)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_an_update_is_adamw_on_divided_gradients(dtype: torch.dtype, bound: float) -> None:
    ours, theirs = model_with_gradients(dtype), model_with_gradients(torch.float64)
    settings = AdamW(betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.2)
    optimizer = make_optimizer(ours.named_parameters(), settings, embeddings=TABLES)
    decayed = [p for name, p in theirs.named_parameters() if p.ndim >= 2 and name not in TABLES]
    plain = [p for name, p in theirs.named_parameters() if p.ndim < 2 or name in TABLES]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    gradients = [parameter.grad.clone() for parameter in theirs.parameters()]
    for lr, divisor in ((0.1, 1.0), (0.05, 3.7), (0.2, 1234.5)):
        for mine, truth, gradient in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
            mine.grad, truth.grad = gradient.to(dtype), gradient / divisor
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        update(optimizer, lr, torch.tensor(divisor, dtype=dtype), ZERO)
    with torch.no_grad():
        for mine, truth in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert float((mine - truth).abs().max() / truth.abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_no_bit(dtype: torch.dtype) -> None:
    model = model_with_gradients(dtype)
    optimizer = make_optimizer(model.named_parameters(), AdamW(), embeddings=TABLES)
    update(optimizer, 0.1, ONE.to(dtype), ZERO)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    next(model.parameters()).grad[0, 0] = torch.nan
    update(optimizer, 0.1, torch.tensor(torch.nan, dtype=dtype), ONE)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(state[index][key], value) for index in state for key, value in found[index].items()
    )
    # Only the gradient that was bad is bad, so that it can be named.
    assert [bool(torch.isfinite(p.grad).all()) for p in model.parameters()].count(False) == 1


@pytest.mark.parametrize(
    ("whole", "dtype"), [(False, torch.float64), (True, torch.float64), (False, torch.bfloat16)], ids=str
)
def test_uneven_pieces_are_updated_as_the_whole_is_also_where_torch_has_put_the_gradient_together(
    ranks: Callable[[int], Pool], whole: bool, dtype: torch.dtype
) -> None:
    weight, gradient = matrices(dtype)
    alone = nn.Parameter(weight.clone())
    alone.grad = gradient.clone()
    optimizer = make_optimizer([("w", alone)], AdamW(weight_decay=0.3))
    for _ in range(STEPS):
        update(optimizer, LR, ONE.to(dtype), ZERO)
    for found in ranks(2).run(step_of_pieces, whole, dtype):
        assert torch.equal(found, alone.detach())


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, gradient = torch.randn(
        2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    return weight, gradient


def step_of_pieces(worker: Worker, whole: bool, dtype: torch.dtype) -> Tensor:
    """Five columns on two ranks."""
    device_mesh = join(worker, Layout(data=1, tensor=2)).sub("tensor")
    weight, gradient = matrices(dtype)
    parameter = nn.Parameter(distribute_tensor(weight, device_mesh, [Shard(1)]))
    parameter.grad = distribute_tensor(gradient, device_mesh, [Replicate() if whole else Shard(1)])
    optimizer = make_optimizer([("w", parameter)], AdamW(weight_decay=0.3), slices_of=local_slices)
    for _ in range(STEPS):
        update(optimizer, LR, ONE.to(dtype), ZERO)
    return parameter.detach().full_tensor()
