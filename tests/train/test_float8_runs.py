"""A run in float8: steps that are made again, what is told of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, job, start, weights
from rich.console import Console

from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, write_checkpoint
from shardwise.config import from_tables
from shardwise.errors import ConfigError, RunFailed, UserError
from shardwise.models.float8_products import Float8Product, Scale, ScaledProduct
from shardwise.observe.render_report import render
from shardwise.observe.summary import summarise
from shardwise.plans import choose
from shardwise.plans.float8_choice import in_float8, multiplied_in_float32, scale_count, unfit
from shardwise.search.search import workload_of
from shardwise.train.build import Training, save
from shardwise.train.describe import _slow_products, describe_run
from shardwise.train.inference import Sampling, load_checkpoint
from shardwise.train.steps import steps

MODEL = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocabulary": 259}
EXPERTS = {**MODEL, "experts": 4, "experts_per_token": 2, "expert_ffn": 32}


def training(corpus: str, model: dict[str, Any] = MODEL, **train: Any) -> Training:
    return start(
        ALONE, job(corpus, model=model, train={"precision": "float8", "steps": 4, "micro_batch": 2, **train})
    )


def scale(built: Training, name: str) -> Scale:
    module = built.parallel.model.get_submodule(name)
    assert isinstance(module, Scale)
    return module


def test_a_tensor_that_outgrows_its_scale_has_its_step_made_again_on_the_same_data(corpus: str) -> None:
    built, usual = training(corpus), training(corpus)
    undisturbed = list(steps(usual))
    assert [step.again for step in undisturbed] == [0, 0, 0, 0]
    done = []
    for step in steps(built):
        done.append(step)
        if step.step == 2:  # as if far smaller numbers had been seen
            scale(built, "blocks.1.feed_forward.down.float8.input").maxima.mul_(2.0**-10)
            built.parallel.scales.begin()
    assert [step.again for step in done] == [0, 0, 1, 0]
    assert [step.data for step in done] == [step.data for step in undisturbed]
    assert [step.loss for step in done] == [step.loss for step in undisturbed], (
        "with scales that fit it is the same step"
    )
    assert done[2].float8 is not None
    assert set(done[2].float8) == {"blocks.0", "blocks.1", "head"}


def test_a_tensor_of_which_nothing_but_zeros_was_seen_is_not_lost_below_the_range(corpus: str) -> None:
    """As gradients are of steps whose tokens carry no loss. There is no scale to know, and 1 would lose all
    that is not zero."""
    built, usual = training(corpus), training(corpus)
    undisturbed, done = list(steps(usual)), []
    for step in steps(built):
        done.append(step)
        if step.step == 2:
            scale(built, "blocks.0.attention.value.float8.gradient").maxima.zero_()
            built.parallel.scales.begin()
    assert [step.again for step in done] == [0, 0, 1, 0]
    assert [step.loss for step in done] == [step.loss for step in undisturbed]
    assert all(relative <= 1 for step in done for _, relative in (step.float8 or {}).values())


def test_experts_have_scales_that_are_followed_as_others_are(corpus: str) -> None:
    """One for the weights of gate and up, from the larger of them; and a step is made again where an expert's
    tensor outgrows."""
    built = training(corpus, EXPERTS, learning_rate=1e-3)
    again, inside = [], "blocks.1.feed_forward.experts"
    with torch.no_grad():
        built.parallel.model.get_parameter(f"{inside}.up")[2, 3, 4] = 6.5
    for step in steps(built):
        again.append(step.again)
        for kind in ("input", "gradient"):
            assert scale(built, f"{inside}.float8.gate_up.{kind}").maxima[0] > 0
        if step.step == 2:
            scale(built, f"{inside}.float8.down.gradient").maxima.mul_(2.0**-10)
            built.parallel.scales.begin()
    assert again == [0, 0, 1, 0]
    assert scale(built, f"{inside}.float8.gate_up.weight").value == 64.0, "6.5 times 64 is below 448"


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_weights_that_are_cast_once_for_all_micro_batches_compute_what_those_cast_in_each_do(
    monkeypatch: pytest.MonkeyPatch, corpus: str, model: dict[str, Any]
) -> None:
    once = training(corpus, model)
    assert once.plan.accumulation > 1
    losses = [step.loss for step in steps(once)]
    products = {
        name: one for name, one in once.parallel.model.named_modules() if isinstance(one, ScaledProduct)
    }
    assert [name for name, one in products.items() if one.cached_weights is None] == ["head.float8"]
    query = once.parallel.model.get_submodule("blocks.0.attention.query")
    of_weight, (kept, transposed) = query.float8.weight.value, query.float8.cached_weights
    assert torch.equal(kept.float(), (query.weight.bfloat16().float() * of_weight).to(kept.dtype).float()), (
        "of the last update"
    )
    assert torch.equal(transposed.T.float(), kept.float())
    monkeypatch.setattr("shardwise.plans.plan.casts_once", lambda *_: False)
    in_each = training(corpus, model)
    assert [step.loss for step in steps(in_each)] == losses
    assert not in_each.parallel.scales.cast_once


@pytest.mark.full  # compiles for minutes where nothing was compiled before
def test_compiled_blocks_multiply_by_weights_cast_once_as_by_those_that_they_cast_themselves(
    monkeypatch: pytest.MonkeyPatch, corpus: str
) -> None:
    """The compiler rounds to 8 bits at once, and not to bfloat16 before: so must whoever casts weights for
    compiled blocks."""
    model = {**MODEL, "layers": 1}
    losses = [step.loss for step in steps(training(corpus, model, steps=2, compile=True))]
    monkeypatch.setattr("shardwise.plans.plan.casts_once", lambda *_: False)
    assert [step.loss for step in steps(training(corpus, model, steps=2, compile=True))] == losses


def test_the_first_step_is_made_with_the_scales_that_it_shows_to_be_needed(corpus: str) -> None:
    built = training(corpus)
    next(iter(steps(built)))
    of_input = scale(built, "head.float8.input")
    assert of_input.maxima[0] > 0
    assert of_input.value.item() == 2.0 ** torch.floor(torch.log2(448 / 2 / of_input.maxima[0])).item()


def test_dynamic_scales_need_no_former_step(corpus: str) -> None:
    built = training(corpus, float8_scaling="dynamic")
    assert [step.again for step in steps(built)] == [0] * 4
    assert all(
        module.dynamic for module in built.parallel.model.modules() if isinstance(module, Float8Product)
    )


def test_a_number_that_is_not_finite_stops_the_run(corpus: str) -> None:
    built = training(corpus)
    going = steps(built)
    next(going)
    with torch.no_grad():
        built.parallel.model.get_parameter("blocks.1.attention.value.weight")[0, 0] = torch.inf
    with pytest.raises(
        RunFailed, match=r"but not the weight of the float8 product of blocks\.1\.attention\.value"
    ):
        list(going)


def test_products_are_those_of_the_model_but_what_is_left_out(corpus: str) -> None:
    built = training(corpus, float8_leave_out=["blocks.0.*", "*.value"], float8_head=False)
    own = [
        name.removesuffix(".float8")
        for name, module in built.parallel.model.named_modules()
        if isinstance(module, Float8Product)
    ]
    assert own == [f"blocks.1.{name}" for name in ("attention.query", "attention.key", "attention.output",
                                                   "feed_forward.gate", "feed_forward.up",
                                                   "feed_forward.down")]  # fmt: skip
    assert own == in_float8(built.config.model, built.config.train)
    scales = {id(module) for module in built.parallel.model.modules() if isinstance(module, Scale)}
    assert len(scales) == scale_count(built.config.model, built.config.train)


@pytest.mark.parametrize(
    ("pattern", "own"),
    [
        ("*.experts.up", ["down"]),
        ("*.experts.down", ["gate_up"]),
        ("*.experts.*", []),
        ("*.attention.*", ["gate_up", "down"]),
    ],
)
def test_experts_gate_and_up_are_left_out_together(corpus: str, pattern: str, own: list[str]) -> None:
    built = training(corpus, EXPERTS, float8_leave_out=[pattern])
    inside = "blocks.0.feed_forward.experts"
    weights = {"gate_up": ["gate", "up"], "down": ["down"]}
    chosen = [name for name in in_float8(built.config.model, built.config.train) if name.startswith(inside)]
    assert chosen == [f"{inside}.{weight}" for name in own for weight in weights[name]]
    products = [
        name for name, module in built.parallel.model.named_modules() if isinstance(module, ScaledProduct)
    ]
    assert [name for name in products if name.startswith(inside)] == [
        f"{inside}.float8.{name}" for name in own
    ]
    scales = {id(module) for module in built.parallel.model.modules() if isinstance(module, Scale)}
    assert len(scales) == scale_count(built.config.model, built.config.train)


def test_an_experts_weight_that_is_not_finite_is_named(corpus: str) -> None:
    built = training(corpus, EXPERTS)
    going = steps(built)
    next(going)
    with torch.no_grad():
        built.parallel.model.get_parameter("blocks.1.feed_forward.experts.down")[1, 0, 0] = torch.inf
    with pytest.raises(
        RunFailed, match=r"the down\.weight of the float8 product of blocks\.1\.feed_forward\.experts"
    ):
        list(going)


def test_sizes_that_do_not_fit_are_left_out(corpus: str) -> None:
    config = from_tables(job(corpus, model={**MODEL, "ffn": 50}, train={"precision": "float8"}))
    assert unfit(config.model, config.train) == [
        f"blocks.{layer}.feed_forward.{name}" for layer in (0, 1) for name in ("gate", "up", "down")
    ]
    config = from_tables(job(corpus, model={**EXPERTS, "expert_ffn": 40}, train={"precision": "float8"}))
    assert unfit(config.model, config.train) == [
        f"blocks.{layer}.feed_forward.experts.{name}" for layer in (0, 1) for name in ("gate", "up", "down")
    ]


@pytest.mark.parametrize(
    ("model", "layout", "length", "slow"),
    [
        ({}, {}, 32, []),
        ({}, {"tensor": 2}, 32, ["gate", "up", "down"]),  # 48 / 2 = 24; a head has 16 features
        ({"heads": 4, "kv_heads": 4, "head_dim": 8}, {"tensor": 2}, 32, ["gate", "up", "down"]),
        (
            {"heads": 4, "head_dim": 8},
            {"tensor": 4},
            32,
            ["query", "key", "value", "output", "gate", "up", "down"],
        ),
        ({}, {"context": 2}, 24, ["query", "key", "value", "output", "gate", "up", "down", "head"]),
        (EXPERTS, {"context": 2}, 24, ["query", "key", "value", "output", "head"]),
    ],
    ids=["one device", "tensor 2", "two heads each", "one key head for two devices", "12 tokens", "experts"],
)
def test_products_that_a_gpu_multiplies_in_float32_are_named(
    corpus: str, model: dict[str, Any], layout: dict[str, Any], length: int, slow: list[str]
) -> None:
    tables = job(
        corpus, model={**MODEL, **model}, train={"precision": "float8", "micro_batch": 1}, layout=layout
    )
    tables["data"]["sequence_length"] = length
    config = from_tables(tables)
    made = in_float8(config.model, config.train)
    named = multiplied_in_float32(config.model, made, config.layout, length // config.layout.context)
    names = [name.rsplit(".", 1)[-1] for name in named]
    assert names == [*slow, *slow] if "head" not in slow else [*slow[:-1], *slow[:-1], "head"]


def test_the_header_names_them_on_a_gpu_only(corpus: str) -> None:
    tables = job(corpus, model=MODEL, train={"precision": "float8", "micro_batch": 1}, layout={"tensor": 2})
    plan = choose(from_tables(tables), 2)
    assert _slow_products(plan, torch.device("cpu")) == ""
    note = _slow_products(plan, torch.device("cuda"))
    assert note.startswith(" (15 products of 8-bit numbers in float32"), "the test's sequences have 24 tokens"


@pytest.mark.parametrize(
    ("model", "train", "why"),
    [
        (
            {"hidden": 120},
            {},
            "the sizes of all products are no multiples of 16 (blocks.0.attention.query, …)",
        ),
        ({}, {"float8_head": False, "float8_leave_out": ["blocks.*"]}, "the job leaves out all products"),
        (
            {"hidden": 120},
            {"float8_head": False, "float8_leave_out": ["*.attention.*"]},
            "the sizes of all products that the job does not leave out are no multiples of 16 "
            "(blocks.0.feed_forward.gate, …)",
        ),
    ],
    ids=["sizes", "left out", "both"],
)
def test_float8_without_any_product_in_float8_has_no_effect_and_is_named_as_such(
    corpus: str, model: dict[str, Any], train: dict[str, Any], why: str
) -> None:
    header = describe_run(training(corpus, {**MODEL, **model}, **train))
    assert f"train.precision = 'float8': {why}" in header["no effect"]
    assert header["precision"].startswith("bfloat16 computation")


def test_float8_with_some_products_in_float8_has_an_effect(corpus: str) -> None:
    header = describe_run(training(corpus, {**MODEL, "ffn": 50}))
    assert "float8" not in header.get("no effect", "")
    assert "but for 6 products of sizes that are no multiples of 16" in header["precision"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"train": {"precision": "bfloat16", "float8_head": False}},
            "has no effect without train.precision = 'float8'",
        ),
        (
            {"train": {"driver": "server"}, "layout": {"data": 2}},
            "float8 needs scales that all gradients of a step agree on",
        ),
        ({"model": {"module": "own.py:Own"}}, "is for the transformer of"),
        ({"layout": {"data": 2, "compression": "topk(0.01)"}}, "set train.float8_scaling = 'dynamic'"),
    ],
    ids=["without", "server", "own module", "error feedback"],
)
def test_what_cannot_be_is_refused(corpus: str, tables: dict[str, Any], message: str) -> None:
    whole = job(
        corpus, **{"model": MODEL, **tables, "train": {"precision": "float8", **tables.get("train", {})}}
    )
    with pytest.raises(ConfigError, match=message):
        from_tables(whole)


def test_a_pattern_that_names_nothing_is_refused(corpus: str) -> None:
    config = from_tables(
        job(corpus, model=MODEL, train={"precision": "float8", "float8_leave_out": ["blocks.9.*"]})
    )
    with pytest.raises(UserError, match=r"'blocks\.9\.\*' is the name of no product"):
        choose(config, 1)
    with pytest.raises(UserError, match=r"'blocks\.9\.\*' is the name of no product"):
        workload_of(config)  # for the planner


def test_who_names_no_product_hears_what_experts_are_called(corpus: str) -> None:
    config = from_tables(
        job(corpus, model=EXPERTS, train={"precision": "float8", "float8_leave_out": ["*.experts.in"]})
    )
    with pytest.raises(
        UserError, match=r"blocks\.0\.attention\.query.*, blocks\.0\.feed_forward\.experts\.down, … and head"
    ):
        choose(config, 1)


@pytest.mark.parametrize(("schedule", "compiled"), [("1f1b", True), ("zb1p", False), ("zbv", False)])
def test_blocks_are_not_compiled_where_the_plan_splits_backward(
    corpus: str, schedule: str, compiled: bool
) -> None:
    """Whoever decided the layout: a job that leaves it to the planner says nothing of a pipeline."""
    model = {**MODEL, "layers": 4}
    config = from_tables(job(corpus, model=model, train={"precision": "float8", "compile": True}))
    layout = config.layout.model_copy(update={"data": 1, "pipeline": 2, "schedule": schedule})
    plan = choose(config.model_copy(update={"layout": layout}), 2)
    assert plan.is_compiled("cpu") is compiled


def test_the_report_shows_what_was_lost_and_warns(tmp_path: Path) -> None:
    step = {"loss": 2.0, "tokens": 8, "seconds": 1.0, "again": 1}
    lost = {"blocks.0": 0.3, "head": 0.0}, {"blocks.0": 0.01, "head": 0.0}
    lines = [
        {**step, "step": n, "float8": {layer: [share, 0.5] for layer, share in of.items()}}
        for n, of in enumerate(lost, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(tmp_path)
    assert summary["float8"] == {
        "layers": {
            "blocks.0": {"lost": 0.01, "most_lost": 0.3, "of_range": 0.5},
            "head": {"lost": 0.0, "most_lost": 0.0, "of_range": 0.5},
        },
        "made_again": 2,
    }
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    render(summary, console)
    text = console.export_text()
    assert "30.0 % of a tensor lost below the range (blocks.0); 2 steps made again" in text.replace(
        "\n", " "
    ).replace("│", "")
    assert "train.float8_leave_out" in text


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_checkpoint_of_a_float8_run_can_be_generated_from(
    corpus: str, tmp_path: Path, model: dict[str, Any]
) -> None:
    """Its products are made in float32 there, which need no scales: those that the checkpoint holds are
    passed over."""
    train = {"precision": "float8", "steps": 1}
    built = start(ALONE, job(corpus, model=model, train=train, run={"folder": str(tmp_path)}))
    next(steps(built))
    held = Contents.open(save(built))
    named = [(StateKey.model(name), tensor) for name, tensor in weights(built).items()]
    write_checkpoint(tmp_path / "weights", held.manifest, named)
    greedy = Sampling(max_tokens=8, temperature=0, seed=0)
    said, expected = (
        "".join(load_checkpoint(address).go_on("ab", greedy))
        for address in (held.address, str(tmp_path / "weights"))
    )
    assert said == expected
