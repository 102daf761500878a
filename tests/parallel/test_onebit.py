"""1-bit Adam on real ranks, against AdamW on one device: what ranks get of its momentum and what they keep
add up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks.jobs import ALONE, FAMILIES, Tables, job, put_together, start
from ranks.pool import Pool
from ranks.residuals import left_out
from torch import Tensor

from shardwise.config import from_tables
from shardwise.errors import ConfigError
from shardwise.mesh import Worker
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.describe import describe_run
from shardwise.train.steps import steps

Ranks = Callable[[int], Pool]
State = dict[str, dict[str, Tensor]]
"""Weights, moments and what was left out of momenta: by what, and by parameter."""
WARM_UP, BETAS, EPSILON = 3, (0.8, 0.99), 1e-8


MODELS = {
    "llama": FAMILIES["llama"],
    "one key head": {**FAMILIES["llama"], "layers": 2, "hidden": 128, "kv_heads": 1, "head_dim": 32},
    "large experts": {**FAMILIES["experts"], "layers": 2, "expert_ffn": 48},
}
"""The others have weights that are large, and that nobody sums along the axes of the rest."""


def tables_of(corpus: str, layout: dict[str, Any], optimizer: str, model: str = "llama") -> Tables:
    train = {"micro_batch": 1, "clip": False, "steps": WARM_UP + 2}
    settings = {"name": optimizer, "betas": list(BETAS)}
    return job(corpus, model=MODELS[model], layout=layout, train=train, optimizer=settings)


def states(worker: Worker, tables: Tables) -> list[State]:
    """After each step."""
    training, found = start(worker, tables), []
    for _ in steps(training):
        named = dict(training.parallel.named_parameters())
        parts = {"weights": {name: parameter.detach() for name, parameter in named.items()}}
        for moment in ("exp_avg", "exp_avg_sq"):
            parts[moment] = {
                name: training.optimizer.state[parameter][moment] for name, parameter in named.items()
            }
        state = {what: put_together(tensors, worker.world) for what, tensors in parts.items()}
        found.append({**state, "kept": left_out(training, state["weights"])})
    return found


@pytest.mark.parametrize(
    ("model", "layout", "codec"),
    [
        ("llama", {"data": 2, "zero": 0}, "sign"),
        ("llama", {"replica": 2, "data": 2, "zero": 2, "compression_axes": "replica"}, "topk(0.05)"),
        pytest.param("one key head", {"data": 2, "tensor": 2, "zero": 0}, "int8", marks=pytest.mark.full),
        pytest.param("large experts", {"data": 2, "expert": 2, "zero": 0}, "int8", marks=pytest.mark.full),
        pytest.param("llama", {"data": 2, "pipeline": 2, "zero": 0}, "sign", marks=pytest.mark.full),
        pytest.param("llama", {"data": 2, "zero": 0}, "powersgd(2)", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_first_compressed_momentum_and_what_is_kept_are_those_of_one_device(
    ranks: Ranks, corpus: str, model: str, layout: dict[str, Any], codec: str
) -> None:
    plain = states(ALONE, tables_of(corpus, {}, "adamw", model))
    world = layout.get("replica", 1) * layout["data"] * layout.get("tensor", 1) * layout.get("pipeline", 1)
    tables = tables_of(
        corpus, {**layout, "compression": codec, "compression_warmup": WARM_UP}, "1bit-adam", model
    )
    config = from_tables(tables)
    rate = learning_rate(config.train, WARM_UP + 1)
    compared = 0
    for found in ranks(world).run(states, tables):
        before, after, truth = found[WARM_UP - 1], found[WARM_UP], plain[WARM_UP]
        for name, expected in truth["exp_avg"].items():
            scale = max(float(expected.abs().max()), 1e-12)
            assert ((after["exp_avg"][name] + after["kept"][name] - expected).abs() <= 1e-6 * scale).all(), (
                name
            )
            if not after["kept"][name].any():  # it is summed as it is
                assert (after["exp_avg_sq"][name] - truth["exp_avg_sq"][name]).abs().max() <= 1e-6 * scale**2
                continue
            compared += 1
            assert (after["exp_avg_sq"][name] == before["exp_avg_sq"][name]).all(), "the second moment stays"
            size = (before["exp_avg_sq"][name] / (1 - BETAS[1] ** WARM_UP)).sqrt() + EPSILON
            decay = config.optimizer.weight_decay if name != "embedding.weight" else 0.0
            weight = before["weights"][name] * (1 - rate * decay) - rate * after["exp_avg"][name] / size
            assert (after["weights"][name] - weight).abs().max() <= 1e-12, name
    assert compared


def norms(worker: Worker, tables: Tables) -> list[tuple[float, float, float]]:
    """Of each step: the logged gradient norm, that of all gradients, and that with momenta in place of
    compressed gradients."""
    training, found = start(worker, tables), []
    compressed = {
        name
        for part in training.parallel.parts
        for compressor in part.compressors
        for name in compressor.names
    }
    before: dict[str, Any] = {}
    for step in steps(training):
        momenta = {
            name: training.optimizer.state[p]["exp_avg"].clone()
            for name, p in training.parallel.named_parameters()
        }
        # The gradients are gone: what they added to the momenta tells them.
        gradients = {
            name: (new - BETAS[0] * before.get(name, 0.0)) / (1 - BETAS[0]) for name, new in momenta.items()
        }
        mixed = {**gradients, **{name: momenta[name] for name in compressed}}
        found.append((step.gradient_norm, total_norm(gradients), total_norm(mixed)))
        before = momenta
    return found


def total_norm(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5


def test_once_compression_begins_the_logged_norm_is_that_of_summed_momenta_and_the_header_says_so(
    ranks: Ranks, corpus: str
) -> None:
    tables = tables_of(corpus, {"data": 2, "compression": "int8", "compression_warmup": WARM_UP}, "1bit-adam")
    for found in ranks(2).run(norms, tables):
        for step, (logged, of_gradients, of_momenta) in enumerate(found, 1):
            truth, other = (of_gradients, of_momenta) if step <= WARM_UP else (of_momenta, of_gradients)
            assert logged == pytest.approx(truth, rel=1e-9) != pytest.approx(other, rel=0.01)
    clipped = {**tables, "train": {**tables["train"], "clip": 0.5}}
    said = ranks(2).run(header, clipped)[0]["optimizer"]
    assert said.startswith("1-bit Adam")
    assert f"after step {WARM_UP} train.clip and the logged gradient norm are those of summed momenta" in said


def header(worker: Worker, tables: Tables) -> dict[str, str]:
    return describe_run(start(worker, tables))


@pytest.mark.parametrize(
    ("layout", "warned"),
    [
        ({"data": 2, "compression": "sign"}, True),
        ({"data": 2, "compression": "sign", "error_feedback": False}, False),
        ({"data": 2, "compression": "int8"}, False),
    ],
    ids=str,
)
def test_signs_that_are_fed_back_into_adamw_are_warned_of(
    ranks: Ranks, corpus: str, layout: dict[str, Any], warned: bool
) -> None:
    found = ranks(2).run(header, tables_of(corpus, layout, "adamw"))[0]
    assert found["optimizer"] == "AdamW, fused kernel"
    assert ("optimizer.name = '1bit-adam'" in found.get("warning", "")) == warned == ("warning" in found)


def test_signs_in_1_bit_adam_are_not_warned_of(ranks: Ranks, corpus: str) -> None:
    layout = {"data": 2, "compression": "sign", "compression_warmup": WARM_UP}
    assert "warning" not in ranks(2).run(header, tables_of(corpus, layout, "1bit-adam"))[0]


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ({"data": 2}, {}, "has no effect without layout.compression"),
        ({"data": 2, "compression": "sign"}, {}, "needs layout.compression_warmup"),
        ({"data": 2, "zero": 2, "compression": "sign", "compression_warmup": 3}, {}, "whole momenta"),
        (
            {"data": 2, "compression": "sign", "compression_warmup": 3},
            {"precision": "bfloat16", "state_dtype": "bfloat16"},
            "float32 states",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    corpus: str, layout: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    tables = job(
        corpus,
        model=FAMILIES["llama"],
        layout=layout,
        train={"steps": 5, **more},
        optimizer={"name": "1bit-adam"},
    )
    with pytest.raises(ConfigError, match=said):
        from_tables(tables)
