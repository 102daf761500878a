from __future__ import annotations

import pytest
import torch

from shardwise.config import PRESETS, Model
from shardwise.config.parameters import active_count, count, parameter_shapes
from shardwise.models import Transformer

# The numbers of the released checkpoints (model cards and safetensors indexes); GPT-3's from its published
# shape.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "llama3-8b": 8.0,
}  # billions, as the model cards round them


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    assert count(Model(**PRESETS[preset])) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", ACTIVE)
def test_a_token_meets_the_published_number_of_parameters(preset: str) -> None:
    assert active_count(Model(**PRESETS[preset])) / 1e9 == pytest.approx(ACTIVE[preset], abs=0.06)


def test_every_preset_of_a_released_model_is_checked() -> None:
    assert {name for name in PRESETS if not name.startswith(("bytes-", "moe-"))} == PUBLISHED.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_names_shapes_and_order_are_those_of_the_module(preset: str) -> None:
    model = Model(**PRESETS[preset])
    with torch.device("meta"):
        module = Transformer(model)
    named = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    assert list(parameter_shapes(model).items()) == named


@pytest.mark.parametrize("preset", PRESETS)
def test_a_tied_head_counts_once(preset: str) -> None:
    model = Model(**PRESETS[preset])
    untied = count(model.model_copy(update={"tied": False}))
    assert count(model) == untied - (model.vocabulary * model.hidden if model.tied else 0)


def test_parameters_are_counted_as_by_hand() -> None:
    model = Model(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=6, vocabulary=5, max_positions=3,
    norm="layer",
                  positions="learned", activation="gelu", bias=True, qk_norm=True)  # fmt: skip
    embedding = 5 * 8 + 3 * 8
    attention = 8 * 8 + 2 * 4 * 8 + 8 * 8 + (8 + 4 + 4 + 8)
    feed_forward = 2 * 6 * 8 + (6 + 8)
    norms = 3 * (8 + 8) + 2 * 4
    assert count(model) == embedding + attention + feed_forward + norms + 5 * 8


def test_router_and_shared_experts_count_as_active_feed_forward() -> None:
    model = Model(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=99, vocabulary=5, experts=7,
    experts_per_token=3,
                  expert_ffn=6, shared_experts=2)  # fmt: skip
    per_layer = 7 * 8 + 3 * 2 * 6 * 8
    per_layer += 7 * 3 * 6 * 8
    rest = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 2 * 8) + 8 + 2 * 5 * 8  # attention, norms, embedding and head
    assert count(model) == 2 * per_layer + rest
    assert count(model) - active_count(model) == 2 * (7 - 3) * 3 * 6 * 8
    with torch.device("meta"):
        module = Transformer(model)
    assert list(parameter_shapes(model).items()) == [
        (name, tuple(value.shape)) for name, value in module.named_parameters()
    ]
