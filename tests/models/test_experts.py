"""The mixture of experts against Hugging Face's blocks, and against formulas written token by token, in
float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_transformer_families import LLAMA_NAMES, ExactRotary, exact_rms_norm, random_model, shared
from torch import Tensor, nn

# The runtime of zero-bubble pipelines uses these two; there is no public door to them but a whole pipeline.
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.config import Model
from shardwise.config.model_config import to_config, to_model
from shardwise.models import Transformer, check_values, initialise, weights_without_memory
from shardwise.models.experts import Experts, MixtureOfExperts, apply_experts, attach
from shardwise.models.rotary import rotary_frequencies
from shardwise.models.sorting import (
    Sorting,
    copy_rows,
    inverse_permutation,
    sort_unevenly,
    sum_rows,
    weighted_sum,
)

transformers = pytest.importorskip("transformers")

SHAPE = {"hidden": 16, "ffn": 40, "expert_ffn": 24, "experts": 6, "experts_per_token": 2}
DEEPSEEK = {
    **SHAPE,
    "router": "sigmoid",
    "shared_experts": 2,
    "routing_scale": 2.5,
    "experts_per_token": 3,
    "balance_bias": 0.05,
}
BALANCED = {"balance_loss": 0.3, "router_z_loss": 0.02}
EXACT = {"experts_implementation": "eager"}  # Hugging Face's other one knows no float64
Gradients = dict[str, Tensor]


def mixture(**fields: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    module = MixtureOfExperts(Model(**{**SHAPE, **fields})).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def tokens(batch: int = 3, sequence: int = 7) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(batch, sequence, SHAPE["hidden"], dtype=torch.float64, requires_grad=True)


def gradients(module: nn.Module, x: Tensor, loss: Tensor) -> Gradients:
    named = {**dict(module.named_parameters()), "x": x}
    return dict(
        zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True)
    )


def test_a_compiled_mixture_has_the_gradients_of_one_that_is_not() -> None:
    """In float64, where casts to the wide dtype do nothing: torch 2.11 lost the gradient of such a cast."""
    module, x = mixture(**DEEPSEEK, **BALANCED), tokens()
    truth = gradients(module, x, module(x).square().sum())
    compiled = torch.compile(module.forward, backend="eager")
    for name, found in gradients(module, x, compiled(x).square().sum()).items():
        torch.testing.assert_close(found, truth[name], rtol=1e-12, atol=1e-12)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def weighing(y: Tensor) -> Tensor:
    """A loss with a different gradient for each output."""
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()


# Against Hugging Face


def hugging_block(model: Model, family: str) -> nn.Module:
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        return MixtralSparseMoeBlock(mixtral_config(model)).double().eval()
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return Qwen3MoeSparseMoeBlock(qwen_config(model)).double().eval()


def mixtral_config(model: Model) -> Any:
    fields = {
        **shared(model),
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
    }
    return transformers.MixtralConfig(
        **{**fields, "intermediate_size": model.expert_width, "sliding_window": None, **EXACT}
    )


def qwen_config(model: Model) -> Any:
    return transformers.Qwen3MoeConfig(
        **shared(model),
        num_experts=model.experts,
        num_experts_per_tok=model.experts_per_token,
        moe_intermediate_size=model.expert_width,
        norm_topk_prob=model.normalise_routing,
        decoder_sparse_step=1,
        **EXACT,
        mlp_only_layers=[],
    )


def hugging_names(ours: MixtureOfExperts) -> dict[str, Tensor]:
    experts = ours.experts
    return {
        "gate.weight": ours.router.weight.data,
        "experts.gate_up_proj": torch.cat((experts.gate.data, experts.up.data), dim=1),
        "experts.down_proj": experts.down.data,
    }


def exact_router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hugging Face fixes the router's softmax to float32; the comparison needs it in float64."""
    logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
    best, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
    return (
        logits,
        best / best.sum(-1, keepdim=True) if getattr(self, "norm_topk_prob", True) else best,
        chosen,
    )


@pytest.mark.parametrize(("family", "normalised"), [("mixtral", True), ("qwen", True), ("qwen", False)])
@pytest.mark.parametrize("exact", [True, False])
def test_outputs_and_gradients_equal_hugging_faces_block(
    family: str, normalised: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = mixture(normalise_routing=normalised)
    theirs = hugging_block(ours.config, family)
    theirs.load_state_dict(hugging_names(ours), strict=True)
    if exact:
        monkeypatch.setattr(type(theirs.gate), "forward", exact_router)
    x = tokens()
    y, expected_y = ours(x), theirs(x)
    found, expected = gradients(ours, x, weighing(y)), gradients(theirs, x, weighing(expected_y))
    pairs = [
        (y, expected_y),
        (found["x"], expected["x"]),
        (found["router.weight"], expected["gate.weight"]),
        (torch.cat((found["experts.gate"], found["experts.up"]), dim=1), expected["experts.gate_up_proj"]),
        (found["experts.down"], expected["experts.down_proj"]),
    ]
    for actual, truth in pairs:
        assert (actual - truth).norm() < (1e-14 if exact else 1e-6) * truth.norm()


@pytest.mark.parametrize("family", ["mixtral", "qwen"])
def test_logits_equal_those_of_hugging_faces_whole_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"qk_norm": True} if family == "qwen" else {}
    model = Model(
        **{**SHAPE, "hidden": 48},
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=6,
        vocabulary=61,
        max_positions=64,
        **more,
    )
    theirs = (
        transformers.MixtralForCausalLM(mixtral_config(model))
        if family == "mixtral"
        else transformers.Qwen3MoeForCausalLM(qwen_config(model))
    )
    theirs, ours = theirs.double().eval(), random_model(model)
    theirs.load_state_dict(_whole_model(ours), strict=True)
    theirs.model.rotary_emb = ExactRotary(rotary_frequencies(model))
    monkeypatch.setattr(type(theirs.model.norm), "forward", exact_rms_norm)
    monkeypatch.setattr(type(theirs.model.layers[0].mlp.gate), "forward", exact_router)
    ids = torch.randint(0, model.vocabulary, (3, 40))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(ids), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "layers", "chosen"), [("mixtral", 1, 2), ("mixtral", 3, 3), ("qwen", 4, 2)]
)
def test_routers_that_route_alike_get_the_gradient_of_hugging_faces_balancing_loss(
    family: str, layers: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"qk_norm": True} if family == "qwen" else {}
    shape = {**SHAPE, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocabulary": 61, "max_positions": 64}
    model = Model(**{**shape, **more, "layers": layers, "experts_per_token": chosen, "balance_loss": 0.07})
    converted, ours = to_config(model)[1], random_model(model)
    assert to_model(converted, "config.json")[1].balance_loss == pytest.approx(0.07, rel=1e-15)
    first = ours.blocks[0]
    with (
        torch.no_grad()
    ):  # layers that put out nothing leave x as it is: all see the same, and no gradient but this loss's
        for block in ours.blocks:
            block.attention.output.weight.zero_()
            block.feed_forward.experts.down.zero_()
            block.feed_forward.router.weight.copy_(first.feed_forward.router.weight * 3)
            block.feed_forward_norm.weight.copy_(first.feed_forward_norm.weight)
            block.feed_forward.gradient_scale = 1 / 40
    kind, config = (
        (transformers.MixtralForCausalLM, mixtral_config(model))
        if family == "mixtral"
        else (transformers.Qwen3MoeForCausalLM, qwen_config(model))
    )
    config.router_aux_loss_coef = converted["router_aux_loss_coef"]
    theirs = kind(config).double().eval()
    theirs.load_state_dict(_whole_model(ours), strict=True)
    monkeypatch.setattr(type(theirs.model.norm), "forward", exact_rms_norm)
    monkeypatch.setattr(type(theirs.model.layers[0].mlp.gate), "forward", exact_router)
    ids = torch.randint(0, 61, (1, 40))
    theirs(ids, labels=ids, output_router_logits=True).loss.backward()
    ours(ids, ids).backward()
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        found, expected = block.feed_forward.router.weight.grad, layer.mlp.gate.weight.grad
        assert expected.norm() > 1e-4
        assert (
            found - expected
        ).norm() < 1e-6 * expected.norm()  # their sums are in float32 whatever the model is in


def _whole_model(ours: Transformer) -> dict[str, Tensor]:
    copied = {}
    for name, value in ours.state_dict().items():
        if "feed_forward." not in name:
            for pattern, new in LLAMA_NAMES:
                name = re.sub(pattern, new, name)
            copied[name] = value
    for index, block in enumerate(ours.blocks.children()):
        copied.update(
            {
                f"model.layers.{index}.mlp.{name}": value
                for name, value in hugging_names(block.feed_forward).items()
            }
        )
    return copied


# Against formulas


def plain(module: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block token by token: outputs, normalised scores and choices."""
    config, outputs, shares, choices = module.config, [], [], []
    experts, weight = module.experts, module.router.weight
    for token in x.flatten(0, 1):
        logits = weight @ token
        scores = logits.softmax(0) if config.router == "softmax" else 1 / (1 + torch.exp(-logits))
        ranked = scores.detach() if module.router.bias is None else scores.detach() + module.router.bias
        chosen = sorted(range(config.experts), key=lambda i, ranked=ranked: -float(ranked[i]))[
            : config.experts_per_token
        ]
        divisor = sum(scores[i] for i in chosen) if config.normalise_routing else 1.0
        output = torch.zeros_like(token)
        for i in chosen:
            visited = experts.down[i] @ (F.silu(experts.gate[i] @ token) * (experts.up[i] @ token))
            output = output + config.routing_scale * scores[i] / divisor * visited
        if module.shared is not None:
            s = module.shared
            output = output + s.down.weight @ (F.silu(s.gate.weight @ token) * (s.up.weight @ token))
        outputs.append(output)
        shares.append(scores / scores.sum())
        choices.append(torch.bincount(torch.tensor(chosen), minlength=config.experts))
    shape = (*x.shape[:2], config.experts)
    return torch.stack(outputs).view_as(x), torch.stack(shares).view(shape), torch.stack(choices).view(shape)


def plain_loss(module: MixtureOfExperts, x: Tensor, shares: Tensor, choices: Tensor) -> Tensor:
    """The balancing losses as the module's docstring states them."""
    config = module.config
    loss = torch.zeros((), dtype=x.dtype)
    for sequence in range(x.shape[0]):
        f = choices[sequence].sum(0).double() / (x.shape[1] * config.experts_per_token)
        p = shares[sequence].mean(0)
        loss = loss + config.balance_loss * x.shape[1] * config.experts * (f * p).sum()
    logits = x.flatten(0, 1) @ module.router.weight.T
    return loss + config.router_z_loss * logits.exp().sum(-1).log().square().sum()


@pytest.mark.parametrize(
    "fields", [SHAPE, DEEPSEEK, {**SHAPE, "experts_per_token": 6}, {**SHAPE, "experts_per_token": 1}]
)
def test_outputs_and_gradients_equal_the_formula_token_by_token(fields: dict[str, Any]) -> None:
    module, x = mixture(**fields), tokens()
    if module.router.bias is not None:
        module.router.bias = torch.linspace(-0.4, 0.4, 6)
    actual, (expected, _, choices) = module(x), plain(module, x)
    close(actual, expected)
    close(gradients(module, x, weighing(actual)), gradients(module, x, weighing(expected)))
    assert torch.equal(module.take_load(), choices.sum((0, 1)))


@pytest.mark.parametrize("fields", [SHAPE, DEEPSEEK])
@pytest.mark.parametrize("losses", [{"balance_loss": 0.3}, {"router_z_loss": 0.02}, BALANCED])
def test_attached_losses_give_the_gradients_of_the_written_ones(
    fields: dict[str, Any], losses: dict[str, float]
) -> None:
    module, x = mixture(**fields, **losses), tokens()
    module.gradient_scale = torch.tensor(0.25, dtype=torch.float64)
    expected, shares, choices = plain(module, x)
    whole = weighing(expected) + 0.25 * plain_loss(module, x, shares, choices)
    actual = module(x)
    close(actual, expected)  # the value is untouched
    close(gradients(module, x, weighing(actual)), gradients(module, x, whole))


def test_the_balancing_loss_is_one_a_token_when_the_load_is_even() -> None:
    module = mixture(experts=6, experts_per_token=6, balance_loss=1.0)
    nn.init.zeros_(module.router.weight)
    x = tokens()
    _, shares, choices = plain(module, x)
    close(plain_loss(module, x, shares, choices), torch.tensor(21.0, dtype=torch.float64))
    gradient = gradients(module, x, module(x).sum() * 0)["router.weight"]
    close(gradient, torch.zeros_like(gradient))  # and even is where it is smallest


def test_gradients_do_not_depend_on_how_sequences_are_dealt_to_micro_batches() -> None:
    module, x = mixture(**BALANCED), tokens(batch=4)
    whole = gradients(module, x, module(x).square().sum())
    parts = [gradients(module, x, module(part).square().sum()) for part in x.split([1, 3])]
    close({name: parts[0][name] + parts[1][name] for name in whole}, whole)


def test_sums_over_a_split_sequence_make_the_loss_that_of_the_whole() -> None:
    module, x = mixture(balance_loss=0.3), tokens(sequence=8)
    whole = gradients(module, x, module(x).sum())
    halves = x.split([5, 3], dim=1)
    sums: list[Tensor] = []
    module.sum_sequence = lambda local: sums.append(local.detach()) or local
    for half in halves:
        module(half)
    parts = []
    for half, other in zip(halves, reversed(sums), strict=True):
        module.sum_sequence = lambda local, other=other: (
            local + other
        )  # what an all-reduce gives, gradient the identity
        parts.append(gradients(module, x, module(half).sum()))
    close({name: parts[0][name] + parts[1][name] for name in whole}, whole)


@pytest.mark.parametrize("count", [[0, 9, 0, 4, 0, 1], [0, 0, 0, 14, 0, 0], [0] * 6])
def test_an_expert_without_rows_gets_a_gradient_of_zeros_and_one_may_take_all(count: list[int]) -> None:
    experts = mixture().experts
    x = torch.randn(sum(count), SHAPE["hidden"], dtype=torch.float64, requires_grad=True)
    y = experts.outputs(x, torch.tensor(count))
    rows = [i for i, rows in enumerate(count) for _ in range(rows)]
    expected = [
        experts.down[i] @ (F.silu(experts.gate[i] @ r) * (experts.up[i] @ r))
        for i, r in zip(rows, x, strict=True)
    ]
    close(y, torch.stack(expected) if expected else x)
    y.square().sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert [bool(gradient.any()) for gradient in parameter.grad] == [rows > 0 for rows in count]


@pytest.mark.parametrize("chosen", [1, 3])
def test_sums_over_a_tokens_experts_are_rounded_once(chosen: int) -> None:
    """In 16 bits, against the same numbers in float64."""
    torch.manual_seed(6)
    order = torch.randperm(40 * chosen)
    numbers = (
        torch.randn(40 * chosen, 32),
        torch.rand(40, chosen),
        torch.randn(40, 32),
        torch.randn(40 * chosen, 32),
    )
    rows, weights, token, sorted_row = (each.bfloat16() for each in numbers)

    def run(dtype: torch.dtype) -> list[Tensor]:
        visited, by, x = (each.to(dtype).requires_grad_() for each in (rows, weights, token))
        sorting = Sorting(order // chosen, inverse_permutation(order), chosen)
        mixed = weighted_sum(visited, by.flatten(), sorting)
        permuted = copy_rows(x, sorting)
        found = torch.autograd.grad(
            (mixed, permuted), (visited, by, x), (token.to(dtype), sorted_row.to(dtype))
        )
        return [mixed, permuted, *found]

    for found, truth in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), truth, rtol=1.01 * 2.0**-8, atol=1e-9)
    by_hand = torch.stack([rows[place].double() for place in inverse_permutation(order)]).view(40, chosen, 32)
    close(run(torch.float64)[0], (by_hand * weights.double().unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("numbers", [[3, 1, 0, 2, 5], [1] * 6, [0, 0], []])
def test_sums_over_different_numbers_of_copies_are_rounded_once(numbers: list[int]) -> None:
    """In 16 bits, against loops in float64; and copying and summing are each other's backward."""
    torch.manual_seed(8)
    of_row = torch.arange(len(numbers)).repeat_interleave(torch.tensor(numbers, dtype=torch.int64))
    order = torch.randperm(len(of_row))
    sorting = sort_unevenly(of_row[order], inverse_permutation(order), len(numbers))
    copies, copies_gradient = (torch.randn(len(of_row), 4).bfloat16() for _ in range(2))
    rows, rows_gradient = (torch.randn(len(numbers), 4).bfloat16() for _ in range(2))
    weights = torch.rand(len(of_row)).bfloat16()

    def of_copies(x: Tensor, factors: Tensor) -> Tensor:
        summed = torch.zeros(len(numbers), 4, dtype=torch.float64)
        for place, copy in enumerate(order.tolist()):
            summed[of_row[copy]] += factors[copy].double() * x[place].double()
        return summed

    x, y, z = (each.requires_grad_() for each in (rows.clone(), copies.clone(), copies.clone()))
    by = weights.clone().requires_grad_()
    copied, summed, weighted = copy_rows(x, sorting), sum_rows(y, sorting), weighted_sum(z, by, sorting)
    found = [
        *(copied, *torch.autograd.grad(copied, (x,), copies_gradient)),
        *(summed, *torch.autograd.grad(summed, (y,), rows_gradient)),
        *(weighted, *torch.autograd.grad(weighted, (z, by), rows_gradient)),
    ]
    spread, ones = rows_gradient.double()[of_row[order]], torch.ones(len(of_row))
    products = (spread * copies.double()).sum(1)
    truth = [
        *(rows.double()[of_row[order]], of_copies(copies_gradient, ones)),
        *(of_copies(copies, ones), spread),
        *(of_copies(copies, weights), spread * weights[order].double().unsqueeze(1)),
        products[inverse_permutation(order)],
    ]
    for actual, expected in zip(found, truth, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=1.01 * 2.0**-8, atol=1e-6)


# In training


def test_evaluation_counts_no_load_and_attaches_nothing() -> None:
    module, x = mixture(**BALANCED), tokens()
    with torch.no_grad():
        module(x)
    assert not module.load.any()
    trained = module(x)
    assert module.take_load().sum() == 3 * 7 * 2
    assert not module.load.any()
    with torch.no_grad():
        assert torch.equal(module(x), trained)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_counts_the_load_once_and_changes_no_gradient(mode: str) -> None:
    module, x = mixture(**BALANCED, shared_experts=1), tokens()
    expected = gradients(module, x, weighing(module(x)))
    load = module.take_load()
    keep_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    more: dict[str, Any] = {"context_fn": keep_products} if mode == "selective" else {}
    y = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False, **more)
    close(gradients(module, x, weighing(y)), expected)
    assert torch.equal(module.take_load(), load)


def test_a_backward_split_for_zero_bubble_pipelines_gives_the_same_gradients() -> None:
    module, x = mixture(**BALANCED, shared_experts=1), tokens()
    expected = gradients(module, x, weighing(x + module(x)))
    load = module.take_load()
    y = x + module(x)
    (upstream,) = torch.autograd.grad(weighing(y), y, retain_graph=True)
    (for_input,), groups = stage_backward_input([y], [upstream], [x], module.parameters())
    close(for_input, expected["x"])
    stage_backward_weight(module.parameters(), groups)
    close({name: parameter.grad for name, parameter in (*module.named_parameters(), ("x", x))}, expected)
    assert torch.equal(module.take_load(), load)


def test_attaching_gives_the_loss_its_scale_whatever_gradient_comes_back() -> None:
    x, loss = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    (7 * attach(x, 2 * loss, 0.5)).sum().backward()
    assert loss.grad == 1.0
    assert x.grad is not None
    assert x.grad.tolist() == [7.0] * 3


def test_the_bias_decides_who_is_chosen_and_not_with_what_weight() -> None:
    module, x = mixture(**DEEPSEEK), tokens()
    module.router.bias = torch.tensor([9.0, 9, 9, 0, 0, 0])
    routing = module.router(x.flatten(0, 1))
    assert (routing.experts.sort().values == torch.arange(3)).all()
    scores = routing.logits.sigmoid().gather(1, routing.experts)
    close(routing.weights, 2.5 * scores / scores.sum(1, keepdim=True))


def test_the_bias_moves_by_its_step_towards_the_mean_load() -> None:
    module = mixture(**DEEPSEEK)
    module.update_bias(torch.tensor([1, 2, 3, 3, 4, 5]))
    assert module.router.bias is not None
    assert module.router.bias.tolist() == torch.tensor([0.05, 0.05, 0, 0, -0.05, -0.05]).tolist()
    assert "router.bias" in module.state_dict()
    assert "load" not in module.state_dict()


def test_bias_updates_even_out_a_skewed_router() -> None:
    module = mixture(**{**DEEPSEEK, "balance_bias": 0.005})
    x = (
        tokens(batch=16, sequence=16).detach() + 1.0
    )  # a common direction, so that some experts win everywhere
    with torch.enable_grad():
        module(x)
        first = module.take_load()
        for _ in range(200):
            module(x)
            module.update_bias(module.take_load())
        module(x)
    last, mean = module.take_load(), 16 * 16 * 3 / 6
    assert first.max() > 1.5 * mean
    assert first.min() < 0.5 * mean
    assert last.max() < 1.1 * mean
    assert last.min() > 0.9 * mean


def test_the_router_computes_in_float32_whatever_flows_through() -> None:
    module = mixture().bfloat16()
    routing = module.router(tokens().flatten(0, 1).bfloat16())
    assert routing.logits.dtype == routing.shares.dtype == torch.float32
    assert routing.weights.dtype == torch.bfloat16
    assert module(tokens().bfloat16()).dtype == torch.bfloat16


def test_buffers_come_through_a_cast_and_materialising_as_they_are() -> None:
    with weights_without_memory():
        module = MixtureOfExperts(Model(**DEEPSEEK)).bfloat16()
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    assert torch.equal(module.load, torch.zeros(6, dtype=torch.int64))
    assert module.router.bias is not None
    assert torch.equal(module.router.bias, torch.zeros(6))


def test_first_values_of_stacked_weights_are_those_of_other_matrices() -> None:
    model = Model(**{**DEEPSEEK, "layers": 8, "hidden": 64, "expert_ffn": 96})
    module = Transformer(model)
    initialise(module, seed=0)
    check_values(module)
    feed_forward = module.blocks.get_submodule("3.feed_forward")
    assert len({tuple(expert.flatten()[:4].tolist()) for expert in feed_forward.experts.gate}) == 6
    for name, value in feed_forward.named_parameters():
        expected = 0.02 / 4 if "down" in name else 1 / math.sqrt(64) if "router" in name else 0.02
        assert value.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * value.numel())), name
    nn.init.zeros_(feed_forward.experts.up)
    with pytest.raises(AssertionError, match=r"blocks\.3\.feed_forward\.experts\.up is all zero$"):
        check_values(module)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the grouped matmul is for GPUs")
@pytest.mark.parametrize("count", [[3, 900, 0, 41, 80, 0], [0, 0, 0, 700, 0, 0], [128] * 6, [1] * 6, [0] * 6])
def test_the_grouped_matmul_equals_the_loop(count: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(Model(**{**SHAPE, "hidden": 128, "expert_ffn": 96})).cuda()
    rows = torch.randn(sum(count), 128, device="cuda")
    upstream = torch.randn_like(rows)

    def run(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x = rows.to(dtype).requires_grad_()
        inputs = [x, *experts.parameters()]
        weights = [weight.to(dtype) for weight in experts.parameters()]
        y = compute(x, torch.tensor(count, device="cuda"), *weights)
        return [y, *torch.autograd.grad(y, inputs, upstream.to(dtype), materialize_grads=True)]

    exact, grouped = run(apply_experts, torch.float64), run(apply_experts, torch.bfloat16)
    for found, truth in zip(grouped, exact, strict=True):
        assert not found.isnan().any()
        assert (found - truth).norm() <= 0.01 * truth.norm()
