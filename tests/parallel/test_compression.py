"""Compressed gradients on real ranks: what is applied and what is kept add up to the gradient of one device,
on every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from ranks.jobs import ALONE, FAMILIES, Tables, job, on_one_device, put_together, start, train
from ranks.pool import Pool
from ranks.residuals import left_out
from ranks.trained import Ran, Runs, check_held, check_sent, watch
from torch import Tensor

from shardwise.config import Layout
from shardwise.config.compression import is_compressed
from shardwise.mesh import Worker

Ranks = Callable[[int], Pool]
CODECS = [
    "bfloat16",
    "float16",
    "float8",
    "int8",
    "int4",
    "sign",
    "topk(0.05)",
    "randomk(0.1)",
    "qsgd(4)",
    "powersgd(2)",
]
MODELS = {
    **FAMILIES,
    "one key head": {**FAMILIES["llama"], "layers": 2, "hidden": 128, "kv_heads": 1, "head_dim": 32},
    "large experts": {**FAMILIES["experts"], "layers": 2, "expert_ffn": 48},
}
"""With weights that are large, and whole on every tensor device."""
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"data": 2, "zero": 0}),
    ("llama", {"data": 2, "zero": 1}),
    ("llama", {"data": 4, "zero": 2}),
    ("llama", {"data": 2, "zero": 3}),
    ("tied", {"replica": 2, "data": 2, "zero": 3}),
    ("llama", {"data": 2, "tensor": 2, "zero": 0}),
    ("llama", {"data": 2, "tensor": 2, "zero": 3}),
    ("llama", {"data": 2, "pipeline": 2, "zero": 1}),
    ("gpt", {"context": 2, "data": 2, "zero": 2}),
    ("experts", {"data": 4, "expert": 2, "zero": 1}),
    ("experts", {"replica": 2, "data": 2, "expert": 2, "zero": 2}),
    ("one key head", {"data": 2, "tensor": 2, "zero": 0}),
    ("large experts", {"data": 2, "tensor": 2, "zero": 1}),
    ("large experts", {"data": 2, "expert": 2, "zero": 0}),
]


def usual(index: int, codec: str) -> bool:
    """Of the layouts and codecs, what is tried each time: two devices with a tensor axis have whole weights
    in a later row."""
    return index == 0 or (index == 4 and codec in IN_TWO_HOPS) or (index % 8 == 1 and codec == "int8")


def compressed_job(corpus: str, family: str, layout: dict[str, Any], **more: Any) -> Tables:
    return job(corpus, model=MODELS[family], layout=layout, train={"micro_batch": 1, "clip": False, **more})


@dataclass(frozen=True)
class Compressed:
    """A run; and of its first step, what every parameter was given for its gradient, and the sum of what
    devices left out."""

    ran: Ran
    gradients: dict[str, Tensor]
    residuals: dict[str, Tensor]


def train_compressed(worker: Worker, tables: Tables) -> Compressed:
    training = start(worker, tables)
    gradients: dict[str, Tensor] = {}
    residuals: dict[str, Tensor] = {}
    original = training.parallel.forward_backward

    def watched(*arguments: Any) -> Tensor:
        loss = original(*arguments)
        if not gradients:
            own = {name: parameter.grad for name, parameter in training.parallel.named_parameters()}
            gradients.update(
                put_together({name: one for name, one in own.items() if one is not None}, worker.world)
            )
        return loss

    training.parallel.forward_backward = watched  # type: ignore[method-assign]
    ran = watch(training, lambda: residuals.update(left_out(training, gradients)))
    return Compressed(ran, gradients, residuals)


RunsCompressed = Callable[[Tables], list[Compressed]]


@pytest.fixture(scope="module")
def compressed(ranks: Ranks) -> RunsCompressed:
    """What every rank of a job came to. A job is trained once for all that is asserted of it."""
    kept: dict[str, list[Compressed]] = {}

    def run(tables: Tables) -> list[Compressed]:
        key = json.dumps(tables, sort_keys=True)
        if key not in kept:
            world = Layout(**{"data": 1, **tables["layout"]}).world
            kept[key] = (
                [train_compressed(ALONE, tables)]
                if world == 1
                else ranks(world).run(train_compressed, tables)
            )
        return kept[key]

    return run


IN_TWO_HOPS = ("int8", "topk(0.05)", "powersgd(2)")
"""Codecs that are always tried on shards that are summed over replicas too; all are on copies."""
ROWS = [
    pytest.param(family, layout, codec, marks=[] if usual(index, codec) else [pytest.mark.full])
    for index, (family, layout) in enumerate(LAYOUTS)
    for codec in CODECS
    if not (codec.startswith("powersgd") and layout.get("tensor", 1) * layout.get("expert", 1) > 1)
]


@pytest.mark.parametrize(("family", "layout", "codec"), ROWS)
def test_bytes_on_the_wire_and_bytes_held_are_those_that_were_predicted(
    compressed: RunsCompressed, corpus: str, family: str, layout: dict[str, Any], codec: str
) -> None:
    tables = compressed_job(corpus, family, {**layout, "compression": codec}, steps=2)
    found = [rank.ran for rank in compressed(tables)]
    check_sent(found, tables)
    check_held(found, tables)


@pytest.mark.parametrize(("family", "layout", "codec"), ROWS)
def test_what_is_applied_and_what_is_left_out_are_the_gradient_of_one_device(
    compressed: RunsCompressed, corpus: str, family: str, layout: dict[str, Any], codec: str
) -> None:
    truth = compressed(compressed_job(corpus, family, {}, steps=2))[0].gradients
    for rank in compressed(compressed_job(corpus, family, {**layout, "compression": codec}, steps=2)):
        gradients, residuals, lossy = rank.gradients, rank.residuals, 0.0
        largest = max(float(expected.abs().max()) for expected in truth.values())
        for name, expected in truth.items():
            scale = max(
                float(expected.abs().max()), 1e-9 * largest
            )  # a key's bias has none: what is there is rounding
            assert ((gradients[name] + residuals[name] - expected).abs() <= 1e-6 * scale).all(), name
            lossy += float(residuals[name].abs().sum())
            if not is_compressed(expected.shape):
                assert ((gradients[name] - expected).abs() <= 1e-9 * scale).all(), name
        assert lossy > 0, "something was left out"


@pytest.mark.full
@pytest.mark.parametrize(("codec", "most"), [("topk(0.01)", 0.022), ("sign", 1 / 28), ("qsgd(4)", 1 / 7.5)])
def test_codecs_send_the_share_of_float32_that_they_promise(
    trained: Runs, corpus: str, codec: str, most: float
) -> None:
    sent = []
    for compression in ({}, {"compression": codec}):
        train = {"steps": 2, "micro_batch": 1, "precision": "float32"}
        tables = job(
            corpus, model={"preset": "bytes-2m"}, layout={"data": 4, "zero": 0, **compression}, train=train
        )
        check_sent(trained(tables), tables)
        ledger = trained(tables)[0].steps[-1].collectives
        hops = {
            "all_reduce": 2,
            "all_to_all": 1,
            "all_gather": 1,
        }  # how often a ring sends three quarters of it
        sent.append(
            sum(
                hops[key.partition("/")[0]] * entry["bytes"]
                for key, entry in ledger.items()
                if key.endswith("/data")
            )
        )
    assert sent[1] <= most * sent[0]


@pytest.mark.parametrize(
    "layout", [pytest.param({"data": 2, "zero": 0}, marks=pytest.mark.full), {"data": 2, "zero": 2}], ids=str
)
def test_until_the_warm_up_ends_every_bit_is_that_of_a_plain_run(
    ranks: Ranks, corpus: str, layout: dict[str, Any]
) -> None:
    plain = ranks(2).run(train, compressed_job(corpus, "llama", layout, steps=4))[0]
    late = {**layout, "compression": "sign", "compression_warmup": 2}
    found = ranks(2).run(train, compressed_job(corpus, "llama", late, steps=4))[0]
    assert found.losses[:3] == plain.losses[:3], "the third loss is of weights that two plain steps made"
    assert found.losses[3] != plain.losses[3]
    assert found.norms[:2] == plain.norms[:2]


@pytest.mark.parametrize("codec", ["powersgd(4)", pytest.param("int8", marks=pytest.mark.full)])
def test_sums_go_on_beside_attention_that_uses_the_same_devices(
    ranks: Ranks, corpus: str, codec: str
) -> None:
    """Several buckets, and heads that go from device to device in backward."""
    model = {**FAMILIES["llama"], "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 300}
    layout = {"context": 2, "zero": 0, "attention": "ulysses"}
    plain = on_one_device(job(corpus, model=model, train={"micro_batch": 1, "steps": 4}))
    tables = job(
        corpus, model=model, layout={**layout, "compression": codec}, train={"micro_batch": 1, "steps": 4}
    )
    assert ranks(2).run(train, tables)[0].losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


@pytest.mark.parametrize(
    "codec",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("powersgd(4)", "int8")),
        "powersgd(64)",
        "terngrad",
    ],
)
@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "zero": 0}, pytest.param({"replica": 2, "data": 2, "zero": 1}, marks=pytest.mark.full)],
    ids=str,
)
def test_short_states_and_matrices_with_fewer_rows_than_factors(
    trained: Runs, corpus: str, layout: dict[str, Any], codec: str
) -> None:
    more = {"steps": 3, "precision": "bfloat16", "state_dtype": "bfloat16", "learning_rate": 0.001}
    tables = job(
        corpus,
        model=MODELS["one key head"],
        layout={**layout, "compression": codec},
        train={"micro_batch": 1, **more},
    )
    plain = job(corpus, model=MODELS["one key head"], layout=layout, train={"micro_batch": 1, **more})
    assert trained(tables)[0].losses[-1] == pytest.approx(trained(plain)[0].losses[-1], rel=0.05)


@pytest.mark.parametrize(
    "layout", [{"data": 2, "zero": 0}, pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.full)], ids=str
)
def test_fed_back_errors_keep_a_run_near_the_plain_one(
    ranks: Ranks, corpus: str, layout: dict[str, Any]
) -> None:
    plain = on_one_device(compressed_job(corpus, "llama", {}, steps=20))
    near = ranks(2).run(train, compressed_job(corpus, "llama", {**layout, "compression": "int8"}, steps=20))[
        0
    ]
    assert near.losses[-1] == pytest.approx(plain.losses[-1], rel=0.01)
