"""A right layout passes, a broken one fails, and the fault is named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from ranks.jobs import GPT, LLAMA

from shardwise.config import Config, from_tables
from shardwise.errors import RunFailed, UserError
from shardwise.proof import prove as proving
from shardwise.proof.proof_job import prepare_proof
from shardwise.proof.prove import ProofResult, prove

MODEL = {**LLAMA, "heads": 4, "kv_heads": 2, "hidden": 24}
EXPERTS = {**MODEL, "experts": 4, "experts_per_token": 2, "expert_ffn": 20, "shared_experts": 1,
"balance_loss": 0.01,
           "router_z_loss": 0.001, "balance_bias": 0.001}  # fmt: skip
DEEP, DEEP_EXPERTS = {**MODEL, "layers": 4}, {**EXPERTS, "layers": 4}
"""For two stages on each of two devices."""
TIED = {**GPT, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 24, "max_positions": 48}

AVERAGED = "averaged where it should be summed, over"
LEFT_OVER = "gradients of step 1 are still in those of step 2: not set to zero between them"


def job(source: str, layout: dict[str, Any], model: dict[str, Any] = MODEL, **train: Any) -> Config:
    return from_tables(
        {
            "model": model,
            "data": {"source": source, "sequence_length": 24},
            "train": {
                "global_batch": 8,
                "micro_batch": 2,
                "learning_rate": 0.01,
                "clip": 0.5,
                "warmup": 50,
                **train,
            },
            "layout": layout,
        }
    )


@pytest.mark.parametrize(
    ("device", "layout", "rounding"),
    [("auto", "cpu", "cpu"), ("cpu", "cpu", "cpu"), ("cuda", "cuda", "cuda")],
)
def test_a_layout_is_on_gpus_where_that_is_asked_for_and_the_truth_never_is(
    corpus: str, device: str, layout: str, rounding: str
) -> None:
    asked = job(corpus, {"data": 2}, compile=True)
    proof, _ = prepare_proof(
        asked.model_copy(update={"run": asked.run.model_copy(update={"device": device})}), 2, "bfloat16"
    )
    one_device = {dtype: proof.on_one_device(dtype).config for dtype in ("bfloat16", "float64")}
    assert (proof.config.run.device, proof.config.train.compile) == (layout, layout == "cuda")
    assert (one_device["bfloat16"].run.device, one_device["bfloat16"].train.compile) == (
        rounding,
        rounding == "cuda",
    )
    assert (one_device["float64"].run.device, one_device["float64"].train.compile) == ("cpu", False)


@pytest.mark.parametrize(("batch", "data"), [(4, 2), (3, 1)])
def test_an_open_data_axis_is_as_small_as_the_batch_allows(corpus: str, batch: int, data: int) -> None:
    proof, _ = prepare_proof(job(corpus, {}, global_batch=batch, micro_batch=1), 1, "float64")
    assert proof.config.layout.data == data


def test_halves_of_backwards_that_follow_one_another_are_summed_in_float32(corpus: str) -> None:
    """At the end of a V the weights' halves of several micro-batches come in a row, without a backward
    between."""
    layout = {"pipeline": 2, "data": 2, "schedule": "zbv", "zero": 2}
    found = shown(prove(job(corpus, layout, DEEP, micro_batch=1), steps=1))
    assert found["pass"], found["faults"]


def shown(result: ProofResult) -> dict[str, Any]:
    """As a reader of --json gets it."""
    read: dict[str, Any] = json.loads(json.dumps(result.to_json(), allow_nan=False))
    return read


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"data": 2, "zero": 3}, MODEL),
        pytest.param({"replica": 2}, EXPERTS, marks=pytest.mark.full),
        pytest.param({"tensor": 4}, MODEL, marks=pytest.mark.full),
        pytest.param({"tensor": 2}, TIED, marks=pytest.mark.full),
        ({"pipeline": 2, "data": 1}, TIED),
        pytest.param({"context": 2, "pipeline": 2}, EXPERTS, marks=pytest.mark.full),
        pytest.param({"expert": 2, "tensor": 2, "data": 2}, EXPERTS, marks=pytest.mark.full),
    ],
    ids=lambda value: "" if "layers" in value else str(value),
)
def test_a_layout_passes(corpus: str, layout: dict[str, Any], model: dict[str, Any]) -> None:
    found = shown(prove(job(corpus, layout, model), steps=2))
    assert found["pass"], found["worst"]
    assert found["worst"]["relative_error"] < 1e-9
    assert math.isclose(found["loss"]["reference"], found["loss"]["parallel"], rel_tol=1e-12)
    assert found["diagnosis"] is None


def test_the_report_covers_every_parameter(corpus: str) -> None:
    from shardwise.models import Transformer

    found = shown(prove(job(corpus, {"tensor": 2}, EXPERTS), steps=1))
    assert found["pass"], found["worst"]
    names = {
        name
        for name, _ in Transformer(
            from_tables({"model": EXPERTS, "data": {"source": corpus}}).model
        ).named_parameters()
    }
    for quantity in ("gradient", "weight"):
        assert {row["parameter"] for row in found["parameters"] if row["quantity"] == quantity} == names
    assert {"blocks.0.feed_forward.router.bias"} <= {
        row["parameter"] for row in found["parameters"] if row["quantity"] == "buffer"
    }


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_short_dtype_is_held_against_its_own_rounding(corpus: str, dtype: Any) -> None:
    found = shown(prove(job(corpus, {"data": 2}), steps=2, dtype=dtype))
    assert found["pass"], found["worst"]
    rows = found["parameters"]
    assert all(row["rounding_cost"] > 0 for row in rows if row["quantity"] == "gradient")
    assert max(row["relative_error"] for row in rows) > 1e-9, "a short dtype cannot be that exact"


def test_a_gradient_that_is_zero_but_for_rounding_does_not_fail(corpus: str) -> None:
    """The bias of the keys."""
    found = shown(prove(job(corpus, {"data": 2, "zero": 2}, TIED), steps=3))
    assert found["pass"], found["worst"]


@pytest.mark.parametrize(
    ("layout", "axis", "names"),
    [
        ({"data": 2}, "data", "head.weight"),
        ({"data": 2, "zero": 3}, "data", "blocks.0.attention.query.weight"),
        pytest.param(
            {"context": 2, "tensor": 2}, "context", "blocks.0.attention.query.weight", marks=pytest.mark.full
        ),
        pytest.param({"tensor": 2}, "tensor", "blocks.0.attention_norm.weight", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_dropped_all_reduce_is_found(corpus: str, layout: dict[str, Any], axis: str, names: str) -> None:
    found = shown(prove(job(corpus, layout), steps=1, sabotage="drop-all-reduce"))
    broken, causes = found["sabotage"], found["diagnosis"]["causes"]
    assert not found["pass"]
    assert {cause["what"] for cause in causes} == {f"missing reduction over {axis}"}
    assert broken["axis"] == axis
    assert all(
        broken["rank"] in cause["ranks"] for cause in causes
    )  # a later sum over `tensor` carries it to others
    parameters = {name for cause in causes for name in cause["parameters"]}
    assert names in parameters
    assert parameters == set(broken.get("parameters", parameters))


def test_a_dropped_all_reduce_over_stages_is_found_in_the_norm(corpus: str) -> None:
    found = shown(prove(job(corpus, {"pipeline": 2}), steps=2, sabotage="drop-all-reduce"))
    (cause,) = found["diagnosis"]["causes"]
    assert not found["pass"]
    assert "gradient norm" in cause["what"]
    assert (cause["axis"], cause["ranks"]) == ("pipeline", [found["sabotage"]["rank"]])


@pytest.mark.parametrize(
    "layout",
    [{"pipeline": 2}, pytest.param({"data": 2, "tensor": 2, "zero": 3}, marks=pytest.mark.full)],
    ids=str,
)
def test_a_scaled_gradient_is_found(corpus: str, layout: dict[str, Any]) -> None:
    found = shown(prove(job(corpus, layout), steps=1, sabotage="scale-gradient"))
    (cause,) = found["diagnosis"]["causes"]
    assert not found["pass"]
    assert cause["parameters"] == [found["sabotage"]["parameter"]] == [found["worst"]["parameter"]]
    assert (cause["what"], cause["ranks"]) == ("scaled by 1.01", [found["sabotage"]["rank"]])
    assert math.isclose(cause["ratio"], 1.01)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "model", "recompute"),
    [
        ({"pipeline": 2, "schedule": "zb1p", "tensor": 2}, MODEL, "none"),
        ({"pipeline": 2, "schedule": "dualpipev", "tensor": 2}, DEEP_EXPERTS, "none"),
        ({"pipeline": 2, "tensor": 2}, TIED, "full"),
        ({"pipeline": 2, "schedule": "interleaved", "data": 2, "zero": 2}, DEEP, "none"),
        ({"tensor": 4}, EXPERTS, "none"),
        ({"tensor": 3, "data": 1}, {**TIED, "heads": 6, "kv_heads": 6, "hidden": 25, "ffn": 51}, "none"),
        ({"tensor": 2}, {**MODEL, "kv_heads": 1}, "none"),
        ({"tensor": 2, "context": 2, "attention": "ring"}, MODEL, "selective"),
        ({"tensor": 2, "context": 2, "data": 2, "expert": 4, "zero": 3}, EXPERTS, "none"),
    ],
    ids=lambda value: "" if "layers" in value else str(value),
)
def test_a_fault_in_one_gradient_is_not_blamed_on_a_module(
    corpus: str, layout: dict[str, Any], model: dict[str, Any], recompute: str
) -> None:
    """On every kind of split, the trace of a rank is held against the right part of the reference."""
    found = shown(prove(job(corpus, layout, model, recompute=recompute), steps=1, sabotage="scale-gradient"))
    assert found["diagnosis"]["forward"] is found["diagnosis"]["backward"] is None
    assert [cause["parameters"] for cause in found["diagnosis"]["causes"]] == [
        [found["sabotage"]["parameter"]]
    ]


@pytest.mark.parametrize(
    "layout", [{"context": 2}, pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.full)], ids=str
)
def test_swapped_chunks_are_found(corpus: str, layout: dict[str, Any]) -> None:
    found = shown(prove(job(corpus, layout), steps=1, sabotage="swap-chunks"))
    assert not found["pass"]
    assert found["diagnosis"]["forward"]["module"] == "embedding"
    assert found["diagnosis"]["forward"]["ranks"] == [found["sabotage"]["rank"]]


@pytest.mark.parametrize(
    "layout", [{"expert": 2}, pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.full)], ids=str
)
def test_a_misrouted_token_is_found(corpus: str, layout: dict[str, Any]) -> None:
    found = shown(prove(job(corpus, layout, EXPERTS), steps=1, sabotage="misroute-token"))
    assert not found["pass"]
    assert found["diagnosis"]["forward"]["module"] == found["sabotage"]["module"]
    assert found["diagnosis"]["forward"]["module"].endswith("feed_forward.router")
    assert found["diagnosis"]["forward"]["ranks"] == [found["sabotage"]["rank"]]


@pytest.mark.parametrize(
    ("kind", "layout", "needs"),
    [("drop-all-reduce", {"data": 1}, "layout.data=2"), ("misroute-token", {"data": 2}, "experts")],
)
def test_a_sabotage_that_cannot_be_says_what_it_needs(
    corpus: str, kind: Any, layout: dict[str, Any], needs: str
) -> None:
    with pytest.raises(UserError, match=needs):
        prove(job(corpus, layout), sabotage=kind)


def broken(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(proving, "COMPARE", f"layout_faults:measured_{fault}")
    monkeypatch.setattr(proving, "COMPARE_TRACE", f"layout_faults:traced_{fault}")


@pytest.mark.parametrize(
    ("fault", "layout", "what", "named"),
    [
        pytest.param(
            *("whole_weights_not_summed", {"tensor": 2}, "missing reduction over tensor", "norm.weight"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(
                "whole_weights_summed_twice",
                {"tensor": 2},
                "reduced twice, or not divided, over tensor",
                "norm.weight",
            ),
            marks=pytest.mark.full,
        ),
        (
            "copies_not_summed",
            {"data": 2, "context": 2},
            "missing reduction over data x context",
            "embedding.weight",
        ),
        pytest.param(
            "copies_averaged", {"data": 4}, f"{AVERAGED} data", "embedding.weight", marks=pytest.mark.full
        ),
        ("copies_averaged", {"data": 2}, f"{AVERAGED} micro-batches or data", "embedding.weight"),
        pytest.param(
            "gradients_divided_by_micro_batches",
            {"tensor": 2},
            f"{AVERAGED} micro-batches",
            "norm.weight",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_reduction_is_named_with_its_axis(
    corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, layout: dict[str, Any], what: str, named: str
) -> None:
    broken(monkeypatch, fault)
    diagnosis = shown(prove(job(corpus, layout), steps=1))["diagnosis"]
    assert diagnosis["forward"] is diagnosis["backward"] is None
    (cause,) = diagnosis["causes"]
    assert cause["what"] == what
    assert named in cause["parameters"]
    if "whole" in fault:
        assert all("norm" in name for name in cause["parameters"])


def test_a_loss_divided_by_micro_batches_is_not_called_an_average_over_devices(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, "loss_divided_by_micro_batches")
    diagnosis = shown(prove(job(corpus, {"data": 2}, micro_batch=1), steps=1))["diagnosis"]
    (cause,) = diagnosis["causes"]
    assert diagnosis["forward"] is None
    assert (cause["what"], cause["ratio"]) == (f"{AVERAGED} micro-batches", 0.25)


@pytest.mark.parametrize(
    ("fault", "layout", "what"),
    [
        ("other_rows_from_step_2", {"data": 2}, "other rows of data than one device reads in step 2"),
        ("gradients_not_zeroed", {"data": 2}, LEFT_OVER),
        pytest.param("gradients_not_zeroed", {"tensor": 2}, LEFT_OVER, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_fault_that_begins_after_the_first_step_is_named_there(
    corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, layout: dict[str, Any], what: str
) -> None:
    broken(monkeypatch, fault)
    result = prove(job(corpus, layout), steps=3)
    diagnosis = shown(result)["diagnosis"]
    assert diagnosis["step"] == 2
    (cause,) = diagnosis["causes"]
    assert (cause["what"], cause["ranks"]) == (what, [0, 1])
    assert result.diagnosis.sentences()[0] == "step 2 is the first that differs"


@pytest.mark.parametrize(
    ("fault", "module", "says"),
    [
        (
            "block_skipped_from_step_2",
            "blocks.1",
            "forward: the first output that differs is that of blocks.1 on ranks 0, 1",
        ),
        (
            "block_left_out_from_step_2",
            "blocks.1.attention_norm",
            "forward: blocks.1.attention_norm is not called on ranks 0, 1",
        ),
    ],
)
def test_a_block_that_is_skipped_after_the_first_step_is_named(
    corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, module: str, says: str
) -> None:
    broken(monkeypatch, fault)
    diagnosis = prove(job(corpus, {"data": 2}), steps=2).diagnosis
    assert (diagnosis.step, diagnosis.forward.module) == (2, module)
    assert diagnosis.sentences()[1].startswith(says)


def test_the_first_module_that_computes_something_else_is_named(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, "row_outputs_not_summed")
    found = shown(prove(job(corpus, {"tensor": 2}), steps=1))["diagnosis"]["forward"]
    assert (found["module"], found["ranks"]) == ("blocks.0.attention.output", [0, 1])


@pytest.mark.full
def test_the_first_module_whose_gradient_differs_is_named(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, "gathered_inputs_not_summed_back")
    diagnosis = shown(prove(job(corpus, {"tensor": 2}), steps=1))["diagnosis"]
    assert diagnosis["forward"] is None
    assert (diagnosis["backward"]["module"], diagnosis["backward"]["ranks"]) == ("norm", [0, 1])
    (cause,) = diagnosis["causes"]
    assert (cause["what"], cause["axis"]) == ("missing reduction over tensor", "tensor")


def test_an_activation_gradient_that_is_counted_twice_is_named_with_its_axis(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, "gathered_inputs_summed_back_twice")
    diagnosis = shown(prove(job(corpus, {"tensor": 2}), steps=1))["diagnosis"]
    assert (diagnosis["backward"]["module"], diagnosis["backward"]["ranks"]) == ("norm", [0, 1])
    (cause,) = diagnosis["causes"]
    assert (cause["what"], cause["axis"]) == ("reduced twice, or not divided, over tensor", "tensor")
    assert math.isclose(cause["ratio"], 2)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_wrong_update_is_told_from_wrong_gradients(
    corpus: str, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    broken(monkeypatch, "optimizer_skips_decay")
    found = shown(prove(job(corpus, {"data": 2}), steps=steps))
    (cause,) = found["diagnosis"]["causes"]
    assert cause["what"] == "gradients agree, but not the weights after the update" + (
        " of step 1" if steps > 1 else ""
    )
    assert "blocks.0.attention.query.weight" in cause["parameters"]
    assert "norm.weight" not in cause["parameters"]


@pytest.mark.parametrize(
    ("fault", "says"), [("rank_dies", "exit status 3"), ("rank_raises", "a fault of the test")]
)
def test_a_worker_that_fails_ends_everything_with_its_own_words(
    corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    broken(monkeypatch, fault)
    with pytest.raises(RunFailed, match=says):
        prove(job(corpus, {"data": 2}), steps=1)
