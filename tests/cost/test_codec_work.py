"""What codecs cost: the numbers that the runtime passes through them, counted, and seconds by hand."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.codecs import parse_codec, parse_row_codec
from shardwise.codecs.int8 import Int8
from shardwise.comm import compressed_sums as compressed
from shardwise.config import Model
from shardwise.config.compression import SumCompression, is_compressed
from shardwise.config.parameters import parameter_shapes
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.cost.codec_work import BESIDE_BACKWARD
from shardwise.cost.predict import predict
from shardwise.cost.space import Workload, space_of
from shardwise.cost.traffic import flows

MODEL = Model(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocabulary=512)
MATRICES = [shape for shape in parameter_shapes(MODEL).values() if is_compressed(shape)]
NUMBERS = sum(rows * columns for rows, columns in MATRICES)


def job(codec: str) -> Workload:
    return Workload(MODEL, 128, 8, compression=SumCompression(parse_codec(codec), "all", 0, True))


def predicted(codec: str, **row: int) -> dict[str, float]:
    """Numbers encoded and decoded in a step of rank 0."""
    works = [flow.codec_work for flow in flows(job(codec), space_of([row])) if flow.codec_work is not None]
    return {
        name: sum(float(getattr(work, name)[0]) for work in works)
        for name in ("encoded", "decoded", "kernels")
    }


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers that pass through the codec of one of four devices, with nobody at the other end."""
    found: Counter[str] = Counter()

    def encode(self: Int8, rows: torch.Tensor, seed: int, subtract: bool) -> torch.Tensor:
        found["encoded"] += rows.numel()
        return rows.new_zeros(len(rows), self.wire_bytes(rows.shape[1]), dtype=torch.uint8)

    def decode(self: Int8, wire: torch.Tensor, rows: torch.Tensor, seed: int, add: bool = False) -> None:
        found["decoded"] += rows.numel()

    monkeypatch.setattr(Int8, "encode", encode)
    monkeypatch.setattr(Int8, "decode", decode)
    monkeypatch.setattr(compressed, "exchange", lambda rows, *given: rows)
    monkeypatch.setattr(compressed, "all_gather", lambda *given: None)
    return found


def summed(kind: str, numbers: int) -> None:
    """One sum of so many numbers on the third of four devices, by the code that trains."""
    mesh = SimpleNamespace(worker=None)
    comm: Any = SimpleNamespace(step=1, mesh=mesh, collective=lambda *given, **more: nullcontext())
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 2)
    sums = compressed.EncodedSum(comm, "data", group, parse_row_codec("int8"), 0)
    scattered = kind == "reduce_scatter"
    tensor = torch.zeros(4, numbers // 4) if scattered else torch.zeros(numbers)
    total = torch.zeros(numbers // 4) if scattered else torch.zeros(numbers)
    getattr(sums, kind)(["weight"], sums.rows([tensor], scattered, tensor.dtype), [total], True)


@pytest.mark.parametrize(("kind", "zero"), [("all_reduce", 0), ("reduce_scatter", 1)])
def test_as_many_numbers_pass_through_the_codec_as_in_a_sum_that_runs(
    kind: str, zero: int, counted: Counter[str]
) -> None:
    summed(kind, NUMBERS)
    found = predicted("int8", data=4, zero=zero)
    assert found["encoded"] == counted["encoded"]
    assert found["decoded"] == counted["decoded"]


def test_sums_in_every_micro_batch_encode_in_every_micro_batch() -> None:
    once, each = (predicted("int8", data=4, zero=zero, accumulation=3) for zero in (1, 2))
    assert each == {name: 3 * amount for name, amount in once.items()}


def seconds(codec: str, **row: int) -> float:
    """Of the data axis on an H200 whose links and kernels take no time and whose computing hides nothing."""
    cluster = named("h200x2")
    link = replace(cluster.inside, bandwidth=1e30, latency=0.0, measured=())
    device = replace(cluster.device, overlap=0.0, launch=0.0, bandwidth=1e12, stream=1.0)
    found = predict(job(codec), space_of([row]), replace(cluster, device=device, inside=link, between=link))
    return float(found.seconds["data"][0])


def test_seconds_on_a_gpu_are_bytes_touched_over_the_share_of_the_bandwidth() -> None:
    """Two devices, int8 at 90 %: the numbers once encoded, one and a half times decoded, 5 + 4/512 bytes
    each; 12 bytes to add the gradients to residuals, 8 to hand sums over, at 1 TB/s."""
    expected = NUMBERS * (2.5 * (5 + 4 / 512) / 0.9 + 20) / 1e12
    assert seconds("int8", data=2) == pytest.approx(expected, rel=1e-3)


def test_power_sgd_reads_a_matrix_three_times_and_writes_it_twice() -> None:
    assert seconds("powersgd(4)", data=2) == pytest.approx(NUMBERS * (20 / 0.5 + 12) / 1e12, rel=1e-3)


def test_a_thread_takes_so_long_for_each_number() -> None:
    cluster = CLUSTERS["cpu"]
    quiet = replace(cluster, device=replace(cluster.device, bandwidth=1e30, launch=0.0))
    fast = replace(cluster.inside, bandwidth=1e30, latency=0.0, measured=())
    found = predict(job("sign"), space_of([{"data": 2}]), replace(quiet, inside=fast, between=fast))
    encode, decode = parse_codec("sign").host_nanoseconds
    assert float(found.seconds["data"][0]) == pytest.approx(
        BESIDE_BACKWARD * 1e-9 * NUMBERS * (encode + 1.5 * decode), rel=1e-3
    )


def test_every_codec_has_its_cost_and_none_is_free() -> None:
    for codec in (
        "bfloat16",
        "float16",
        "float8",
        "int8",
        "int4",
        "qsgd(5)",
        "terngrad",
        "sign",
        "topk(0.01)",
        "randomk(0.01)",
        "powersgd(4)",
    ):
        for cluster in (named("h100x2"), CLUSTERS["cpu"]):
            free = replace(cluster.inside, bandwidth=1e30, latency=0.0, measured=())
            links = replace(cluster, inside=free, between=free)
            plain = predict(replace(job(codec), compression=None), space_of([{"data": 2}]), links)
            assert predict(job(codec), space_of([{"data": 2}]), links).seconds["data"] > plain.seconds["data"]
