from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardwise.config import Model
from shardwise.models import Transformer, check_values, initial_value, initialise

CONFIG = Model(
    layers=8, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocabulary=300, qk_norm=True, bias=True
)


def make(dtype: torch.dtype = torch.float32, seed: int = 0, config: Model = CONFIG) -> Transformer:
    module = Transformer(config).to(dtype)
    initialise(module, seed)
    return module


def test_a_value_depends_on_seed_and_name_alone_whatever_else_exists_or_was_drawn() -> None:
    values = dict(make().named_parameters())
    torch.manual_seed(99)
    for name in reversed(list(values)):  # another order
        assert torch.equal(
            initial_value(name, tuple(values[name].shape), CONFIG.layers, seed=0), values[name]
        )
    untied, tied = (
        values,
        dict(make(config=CONFIG.model_copy(update={"tied": True})).named_parameters()),
    )  # a subset
    assert all(torch.equal(value, untied[name]) for name, value in tied.items())


@pytest.mark.parametrize(
    "module",
    [torch.nn.LSTM(4, 4), torch.nn.MultiheadAttention(4, 2), torch.nn.Linear(4, 4)],
    ids=lambda module: type(module).__name__,
)
def test_biases_of_torchs_modules_begin_at_zero_by_whatever_name(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        value = initial_value(name, tuple(parameter.shape), None, seed=0)
        assert (value == 0).all() if "bias" in name else value.std() > 0, name


def test_a_table_that_is_called_a_bias_is_drawn_like_any() -> None:
    assert initial_value("attention.bias", (4, 8), None, seed=0).std() > 0


def test_the_global_random_state_is_left_alone() -> None:
    module = Transformer(CONFIG)
    before = torch.random.get_rng_state()
    initialise(module, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_values_differ_by_name_and_by_seed() -> None:
    first, other = dict(make(seed=0).named_parameters()), dict(make(seed=1).named_parameters())
    matrices = [name for name, value in first.items() if value.ndim == 2]
    assert all(not torch.equal(first[name], other[name]) for name in matrices)
    assert not torch.equal(first["blocks.0.attention.query.weight"], first["blocks.1.attention.query.weight"])
    assert not torch.equal(first["blocks.0.attention.key.weight"], first["blocks.0.attention.value.weight"])


def test_deviations_are_gpt2s() -> None:
    for name, value in make().named_parameters():
        if value.ndim == 2:
            writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = 0.02 / math.sqrt(16) if writes else 0.02
            assert value.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * value.numel())), name
            assert abs(value.mean().item()) < 4 * expected / math.sqrt(value.numel()), name
        else:
            assert torch.equal(
                value, torch.zeros_like(value) if name.endswith("bias") else torch.ones_like(value)
            ), name


def test_float64_starts_from_the_float32_numbers_and_bfloat16_from_their_rounding() -> None:
    narrow, wide, low = (
        dict(make(dtype).named_parameters()) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    )
    for name, value in narrow.items():
        assert torch.equal(wide[name], value.double()), name
        assert torch.equal(low[name], value.bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_part_gets_the_values_that_it_has_in_the_whole(dtype: torch.dtype) -> None:
    """Here the last two thirds of each parameter's last dim; what others hold stays as it was."""

    def part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
        begin, held = parameter.shape[-1] // 3, [slice(0, size) for size in parameter.shape]
        held[-1] = slice(begin, parameter.shape[-1])
        return parameter[..., begin:], tuple(held)

    module = Transformer(CONFIG).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    initialise(module, seed=0, part=part)
    for name, value in make(dtype).named_parameters():
        begin, found = value.shape[-1] // 3, module.get_parameter(name)
        assert torch.equal(found[..., begin:], value[..., begin:]), name
        assert found[..., :begin].isnan().all(), name


def test_fresh_values_pass_the_check() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        check_values(make(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_is_caught_and_its_parameter_named(bad: float) -> None:
    module = make()
    with torch.no_grad():
        module.blocks[3].feed_forward_norm.weight[7] = bad  # type: ignore[union-attr, operator]
    with pytest.raises(AssertionError, match=r"blocks\.3\.feed_forward_norm\.weight holds NaN or infinity"):
        check_values(module)


def test_a_matrix_of_zeros_is_caught_but_zero_biases_are_right() -> None:
    module = make()
    torch.nn.init.zeros_(module.blocks[0].attention.key.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(AssertionError, match=r"blocks\.0\.attention\.key\.weight is all zero$"):
        check_values(module)


def test_the_check_looks_at_the_local_part_and_skips_an_empty_one() -> None:
    module = make()
    with torch.no_grad():
        module.embedding.weight[150:] = float("nan")
    check_values(module, local=lambda parameter: parameter[:150])
    check_values(module, local=lambda parameter: parameter[:0])
