"""Clusters by name and by file: what is written is read again, what is wrong is said, all of it at once."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Model, from_tables
from shardwise.cost.cluster import KINDS, Cluster, Measured
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.cost.clusters import CLUSTERS, DEVICES, named, requested_cluster
from shardwise.cost.predict import predict
from shardwise.cost.space import Workload, space_of
from shardwise.errors import ConfigError, UserError
from shardwise.plans.step_terms import TERMS
from shardwise.search.search import offloads
from shardwise.units import GIB

WHOLE = """
nodes = 2
devices_per_node = 4
[device]
memory_gib = 24
bandwidth_gb_s = 1000
peak = { bfloat16 = 165, float32 = 82.5 }
[inside]
bandwidth_gb_s = 25
latency_us = 10
[between]
bandwidth_gb_s = 5
latency_us = 40
"""


def read_text(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_cluster(path, CLUSTERS)


def problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, text)
    assert "mine.toml" in str(raised.value)
    return raised.value.problems


def numbers(value: Any) -> Any:
    """Figures are written with six digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: numbers(inner) for key, inner in value.items()}
    return [numbers(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_what_is_written_of_a_preset_is_read_again(name: str, tmp_path: Path) -> None:
    assert numbers(asdict(read_text(tmp_path, write_cluster(CLUSTERS[name])))) == numbers(
        asdict(CLUSTERS[name])
    )


def test_all_fields_survive_a_file(tmp_path: Path) -> None:
    rows = tuple(
        Measured(kind, members, 1.5e-5 * members, 2e10 / members) for kind in KINDS for members in (2, 4)
    )
    cluster = replace(
        named("h100x16"),
        name='a "quoted" \\ name',
        inside=replace(CLUSTERS["h100"].inside, measured=rows),
        shared=True,
        price=2.49,
        corrections={"matmul": 1.1, "pipeline_sends": 0.9},
    )
    assert numbers(asdict(read_text(tmp_path, write_cluster(cluster)))) == numbers(asdict(cluster))


def test_a_name_says_how_many_devices() -> None:
    whole, part, one = named("h100x64"), named("h100x4"), named("h100")
    assert (whole.devices, whole.nodes, whole.devices_per_node, whole.name) == (64, 8, 8, "h100x64")
    assert (part.devices, part.nodes, part.devices_per_node) == (4, 1, 4)
    assert (one.devices, one.nodes) == (8, 1)
    assert named(" H100X16 ").nodes == 2
    assert named("gb200x128").nodes == 2
    assert named("h100-gcp-a3-megax32").device == DEVICES["h100"]
    assert named("mi300x").device == DEVICES["mi300x"], "the x of its name is no number of devices"
    assert named("mi300xx16").nodes == 2


@pytest.mark.parametrize("name", ["h100x12", "h100x9", "dgx2x24"])
def test_devices_that_are_not_whole_nodes_are_refused_with_what_is(name: str) -> None:
    with pytest.raises(UserError, match="are not whole nodes of") as raised:
        named(name)
    assert "use 8 or 16" in str(raised.value) or "use 16 or 32" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "meant"), [("h10", "h100"), ("a100", "a100-"), ("h100-gcp", "h100-gcp-a3"), ("B20", "b200")]
)
def test_an_unknown_name_is_answered_with_those_it_may_be(name: str, meant: str) -> None:
    with pytest.raises(UserError) as raised:
        named(name)
    text = str(raised.value)
    assert meant in text.partition("did you mean ")[2].partition("?")[0]
    assert "cluster.file" in text


def test_no_devices_are_refused() -> None:
    with pytest.raises(UserError, match="at least one device"):
        named("h100x0")


def test_the_job_may_ask_for_other_devices_of_its_cluster(tmp_path: Path) -> None:
    def asked(**cluster: Any) -> Cluster | None:
        return requested_cluster(from_tables({"data": {"source": "x"}, "cluster": cluster}).cluster)

    (tmp_path / "mine.toml").write_text(WHOLE)
    found = [asked(preset="h100x64", devices=16), asked(file=str(tmp_path / "mine.toml"), devices=2), asked()]
    assert [one and (one.nodes, one.devices_per_node) for one in found] == [(2, 8), (1, 2), None]
    with pytest.raises(UserError, match=r"cluster\.devices = 12"):
        asked(preset="h100x64", devices=12)


def test_units_are_those_people_say(tmp_path: Path) -> None:
    cluster = read_text(tmp_path, WHOLE)
    assert cluster.device.memory == 24 * GIB
    assert cluster.device.bandwidth == 1e12
    assert cluster.device.peak == {"bfloat16": 165e12, "float32": 82.5e12}
    assert (cluster.inside.bandwidth, cluster.inside.latency) == (25e9, pytest.approx(1e-5))
    assert (cluster.between.bandwidth, cluster.between.latency) == (5e9, pytest.approx(4e-5))
    assert (cluster.name, cluster.device.name) == ("mine", "mine")


def test_several_nodes_need_a_network_and_one_does_not(tmp_path: Path) -> None:
    alone = WHOLE.partition("[between]")[0]
    assert any(problem.startswith("between: missing") for problem in problems(tmp_path, alone))
    cluster = read_text(tmp_path, alone.replace("nodes = 2", "nodes = 1"))
    assert cluster.between == cluster.inside


def test_a_file_may_change_a_preset(tmp_path: Path) -> None:
    text = 'preset = "h100"\nnodes = 4\nprice = 3\n[device]\nmemory_gib = 40\npeak = { bfloat16 = 500 }\n'
    text += "[between]\nbandwidth_gb_s = 1\n"
    found, base = read_text(tmp_path, text), CLUSTERS["h100"]
    assert (found.devices, found.price, found.device.memory) == (32, 3, 40 * GIB)
    assert found.device.peak == {**base.device.peak, "bfloat16": 500e12}
    assert found.between == replace(base.between, bandwidth=1e9)
    assert found.inside == base.inside
    assert found.device.matmul == base.device.matmul


BAD: list[tuple[str, str, str]] = [
    ("nodes = 2", "nodes = 0", "nodes = 0: give a whole number from 1"),
    ("nodes = 2", "nodes = 1.5", "nodes = 1.5: give a whole number from 1"),
    ("nodes = 2", "nodes = true", "nodes = True"),
    ("nodes = 2", 'nodes = "two"', "nodes = 'two'"),
    ("nodes = 2", "node = 2", "node: unknown; known are name, preset, nodes"),
    ("nodes = 2", 'preset = "h10"', "preset = 'h10': unknown"),
    ("nodes = 2", "preset = []", "preset = []"),
    ("nodes = 2", "price = -1", "price = -1: give a number, 0 or more"),
    ("nodes = 2", 'shared = "yes"', "shared = 'yes': give true or false"),
    ("nodes = 2", "name = 3", "name = 3: give a text"),
    ("nodes = 2", 'corrections = "none"', "corrections: give a table"),
    ("nodes = 2", "corrections = { matmul = 0 }", "corrections.matmul = 0: give a number, more than 0"),
    (
        "nodes = 2",
        "corrections = { matmull = 1.5 }",
        "corrections.matmull: unknown; known are matmul, attention",
    ),
    ("memory_gib = 24", "memory_gib = 0", "device.memory_gib = 0: give a number, more than 0"),
    ("memory_gib = 24", "memory_gib = -24", "device.memory_gib = -24"),
    ("memory_gib = 24", "memory_gib = nan", "device.memory_gib = nan"),
    ("memory_gib = 24", "memory_gib = inf", "device.memory_gib = inf"),
    ("memory_gib = 24", 'memory_gib = "24"', "device.memory_gib = '24'"),
    ("memory_gib = 24", "memory = 24", "device.memory_gib: missing"),
    (
        "memory_gib = 24",
        "memory_gib = 24\nmatmul = 1.2",
        "device.matmul = 1.2: is a share; give a number from 0 to 1",
    ),
    ("memory_gib = 24", "memory_gib = 24\nname = 7", "device.name = 7: give a text"),
    ("memory_gib = 24", "memory_gib = 24\nwatts = 0", "device.watts = 0"),
    ("peak = { bfloat16 = 165, float32 = 82.5 }", "peak = 165", "device.peak: give TFLOP/s by precision"),
    ("peak = { bfloat16 = 165, float32 = 82.5 }", "peak = {}", "device.peak: give TFLOP/s by precision"),
    (
        "peak = { bfloat16 = 165, float32 = 82.5 }",
        "peak = { bf16 = 165 }",
        "device.peak.bf16: unknown; known are",
    ),
    ("peak = { bfloat16 = 165, float32 = 82.5 }", "peak = { bfloat16 = -1 }", "device.peak.bfloat16 = -1"),
    (
        "bandwidth_gb_s = 25",
        "bandwidth_gb_s = -25",
        "inside.bandwidth_gb_s = -25: give a number, more than 0",
    ),
    ("bandwidth_gb_s = 25", "", "inside.bandwidth_gb_s: missing"),
    ("bandwidth_gb_s = 25", "bandwith_gb_s = 25", "inside.bandwith_gb_s: unknown"),
    ("latency_us = 10", "latency_us = -1", "inside.latency_us = -1: give a number, 0 or more"),
    ("latency_us = 10", "latency_us = 10\nmeasured = 3", "inside.measured: give rows"),
    (
        "latency_us = 10",
        "latency_us = 10\n[[inside.measured]]\nkind = 'sum'",
        "inside.measured: each row has kind (of all_reduce",
    ),
    (
        "latency_us = 10",
        "latency_us = 10\n[[inside.measured]]\nkind = 'all_reduce'\nmembers = 0\nlatency_us = "
        "1\nbandwidth_gb_s = 1",
        "inside.measured.members = 0: give a whole number from 2",
    ),
    ("nodes = 2", "nodes = 1000000000000", "nodes = 1000000000000: give a whole number from 1, at most"),
    ("nodes = 2", "nodes = [[2]]", "nodes = [[2]]: give a whole number from 1"),
    (
        "nodes = 2",
        "corrections = { matmul = { by = 1 } }",
        "corrections.matmul = {'by': 1}: give a number, more than 0",
    ),
    ("memory_gib = 24", "memory_gib = true", "device.memory_gib = True: give a number"),
    (
        "memory_gib = 24",
        "memory_gib = 1e300",
        "device.memory_gib = 1e+300: give a number, more than 0, at most 1e+18",
    ),
    ("memory_gib = 24", f"memory_gib = 1{'0' * 400}", "device.memory_gib = 1000"),
    (
        "memory_gib = 24",
        "memory_gib = 24\nmatmul = 0",
        "device.matmul = 0: is a share; give a number from 0 to 1, more than 0",
    ),
    ("peak = { bfloat16 = 165, float32 = 82.5 }", "peak = [165]", "device.peak: give TFLOP/s by precision"),
    (
        "peak = { bfloat16 = 165, float32 = 82.5 }",
        "peak = { bfloat16 = { dense = 1 } }",
        "device.peak.bfloat16 = {'dense': 1}",
    ),
    ("latency_us = 10", "latency_us = 10\nmeasured = [1, [2]]", "inside.measured: each row has kind"),
    ("[inside]", "[[inside]]", "inside: give a table"),
    ("[inside]", "[outside]", "inside.bandwidth_gb_s: missing"),
    ("[device]", "[[device]]", "device: give a table"),
]


@pytest.mark.parametrize(
    ("old", "new", "said"), BAD, ids=[new.replace("\n", " ")[:80] or "nothing" for _, new, _ in BAD]
)
def test_a_wrong_figure_is_named_with_what_to_give(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert WHOLE.count(old) >= 1
    assert any(problem.startswith(said) for problem in problems(tmp_path, WHOLE.replace(old, new, 1)))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path, 'nodes = 0\nspeed = 3\n[device]\nmemory_gib = "much"\n[inside]\nbandwidth_gb_s = -1'
    )
    said = "\n".join(found)
    for key in (
        "speed",
        "nodes",
        "device.memory_gib",
        "device.bandwidth_gb_s",
        "device.peak",
        "inside.bandwidth_gb_s",
        "inside.latency_us",
    ):
        assert f"{key}:" in said or f"{key} =" in said


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read.*shardwise probe"):
        read_cluster(tmp_path / "nowhere.toml", CLUSTERS)
    with pytest.raises(UserError, match="is a folder"):
        read_cluster(tmp_path, CLUSTERS)
    (tmp_path / "bad.toml").write_text("nodes = = 2")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_cluster(tmp_path / "bad.toml", CLUSTERS)
    (tmp_path / "bad.toml").write_text("nodes = " + "[" * 100_000)
    with pytest.raises(UserError, match="is not valid TOML"):
        read_cluster(tmp_path / "bad.toml", CLUSTERS)
    (tmp_path / "bad.toml").write_text("nodes = 1" + "0" * 5000)
    with pytest.raises(UserError, match="is not valid TOML"):
        read_cluster(tmp_path / "bad.toml", CLUSTERS)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_cluster(tmp_path / "bytes.toml", CLUSTERS)


def test_every_term_of_a_step_may_be_corrected_and_nothing_else() -> None:
    predicted = predict(Workload(Model(), 64, 8), space_of([{}]), named("h100x8"))
    assert set(TERMS) == set(predicted.seconds)


def test_a_gpu_that_communicates_beside_nothing_is_still_a_gpu(tmp_path: Path) -> None:
    """`overlap` is a share of communication: it changes no second of computing, and nothing of memory."""
    model = Model(layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=2048, vocabulary=1024)
    rows = [{"data": 8, "zero": 3}, {"data": 4, "tensor": 2, "zero": 1}, {"pipeline": 2, "data": 4}]
    space = space_of([{**row, "micro_batch": 1, "accumulation": 4} for row in rows])
    overlapping, alone = (
        predict(Workload(model, 512, 32), space, read_text(tmp_path, text))
        for text in (WHOLE, WHOLE.replace("[device]", "[device]\noverlap = 0"))
    )
    for term in ("matmul", "attention", "elementwise", "recompute", "optimizer"):
        assert alone.seconds[term].tolist() == overlapping.seconds[term].tolist(), term
    assert (alone.seconds["launch"] <= overlapping.seconds["launch"]).all(), "hosts run ahead of a GPU"
    assert (alone.seconds["data"] > overlapping.seconds["data"])[:2].all()
    assert alone.peak.tolist() == overlapping.peak.tolist()
    assert offloads(read_text(tmp_path, WHOLE.replace("[device]", "[device]\noverlap = 0")))
