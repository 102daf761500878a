import tomllib
from dataclasses import replace

import pytest

from shardwise.config import from_tables
from shardwise.cost.cluster import Link
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.search.calibrate import calibrate, corrected_text
from shardwise.search.forecast import forecast

COMPUTING = ["matmul", "attention", "elementwise", "launch", "recompute"]
LINKS = ["tensor", "context", "expert", "data", "replica", "pipeline_sends"]
IDLE = ["imbalance", "bubble"]
TERMS = {"matmul": 0.5, "attention": 0.25, "elementwise": 0.25, "data": 0.25, "optimizer": 0.125}
HERE = replace(named("cpux4"), inside=Link(1e8, 5e-5))
"""With links so slow that communication is more than a hundredth of every step."""


def seconds(what, terms, measured):
    return {"what": what, "kind": "seconds", "terms": terms, "measured": measured}


def rows(step, computing, waiting, optimizer, waits=LINKS):
    found = [
        {"what": "step time", "kind": "seconds", "measured": step},
        seconds("computing", COMPUTING, computing),
    ]
    found += [
        seconds("waits", waits, waiting),
        seconds("optimizer", ["optimizer"], optimizer),
        seconds("unclaimed", [], 0.5),
    ]
    return [*found, {"what": "peak memory", "kind": "memory", "measured": 1.0}]


def test_terms_measured_together_share_a_ratio():
    found, changes = calibrate(HERE, TERMS, rows(3.0, 2.0, 0.375, 0.0625))
    assert found.corrections == {
        **dict.fromkeys(COMPUTING, 2.0),
        **dict.fromkeys(LINKS, 1.5),
        "optimizer": 0.5,
    }
    assert [change.ratio for change in changes] == [2.0, 1.5, 0.5]
    assert not any(change.held for change in changes)
    assert replace(found, corrections={}) == HERE


def test_factors_that_were_there_are_multiplied():
    before = replace(HERE, corrections={"matmul": 0.5, "attention": 1.5, "offload": 3.0})
    found, _ = calibrate(before, TERMS, rows(3.0, 2.0, 0.25, 0.125))
    assert (found.corrections["matmul"], found.corrections["attention"], found.corrections["offload"]) == (
        1.0,
        3.0,
        3.0,
    )


def test_a_factor_is_held_between_a_quarter_and_four():
    found, changes = calibrate(HERE, TERMS, rows(9.0, 8.0, 0.25, 0.0))
    assert (found.corrections["matmul"], found.corrections["optimizer"]) == (4.0, 0.25)
    assert [change.held for change in changes] == [True, False, True]


def test_next_to_no_communication_teaches_nothing():
    found, _ = calibrate(HERE, {**TERMS, "data": 0.01}, rows(3.0, 2.0, 0.02, 0.125))
    assert "data" not in found.corrections
    found, _ = calibrate(HERE, TERMS, rows(3.0, 2.0, 0.02, 0.125))
    assert (
        found.corrections["data"] == 0.25
    )  # much of it was predicted: that it was not there is worth knowing


def test_what_was_not_measured_or_not_predicted_keeps_its_factor():
    found, _ = calibrate(HERE, {**TERMS, "data": 0.0}, rows(3.0, 2.0, 0.5, None))
    assert set(found.corrections) == set(COMPUTING)


def test_a_pipelines_idle_time_takes_the_ratio_of_computing_and_messages_the_rest():
    terms = {**TERMS, "pipeline_sends": 0.75, "bubble": 0.25, "imbalance": 0.25, "data": 0.0}
    found, _ = calibrate(HERE, terms, rows(3.0, 2.0, 1.0 + 0.75 * 1.5, 0.125, LINKS + IDLE))
    assert (found.corrections["bubble"], found.corrections["imbalance"]) == (2.0, 2.0)
    assert found.corrections["pipeline_sends"] == 1.5


def test_where_a_pipeline_is_mostly_idle_messages_keep_their_factors():
    terms = {**TERMS, "pipeline_sends": 0.125, "bubble": 0.75, "imbalance": 0.25, "data": 0.0}
    found, _ = calibrate(HERE, terms, rows(3.0, 2.0, 0.625, 0.125, LINKS + IDLE))
    assert (found.corrections["bubble"], found.corrections["imbalance"]) == (0.5, 0.5)
    assert "pipeline_sends" not in found.corrections


def test_where_waits_are_part_of_computing_they_are_taken_to_be_as_predicted():
    unknown = rows(3.0, None, None, 0.125)
    both = seconds("both", COMPUTING + LINKS, 2.25)
    found, _ = calibrate(HERE, TERMS, [*unknown, both])
    assert found.corrections == {**dict.fromkeys(COMPUTING, 2.0), "optimizer": 1.0}


JOB = {
    "model": {"preset": "bytes-2m"},
    "data": {"source": "none", "sequence_length": 128},
    "train": {"steps": 9, "global_batch": 32, "micro_batch": 4},
}
LAYOUTS = [
    {"data": 4},
    {"data": 4, "zero": 3},
    {"pipeline": 2, "data": 2},
    {"tensor": 2, "data": 2},
    {"pipeline": 4, "data": 1, "schedule": "zb1p"},
]


def measure(terms, slower):
    """What a machine would show that is so many times slower at computing, at communicating and at
    updating."""
    busy, late, step = slower
    computing = busy * sum(terms[name] for name in COMPUTING)
    waiting = late * sum(terms[name] for name in LINKS) + busy * sum(terms[name] for name in IDLE)
    waits = LINKS + IDLE if terms["bubble"] else LINKS
    total = computing + waiting + step * terms["optimizer"]
    return total, rows(total, computing, waiting, step * terms["optimizer"], waits)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("slower", [(1.7, 2.3, 0.6), (0.5, 0.75, 1.5)])
def test_the_next_forecast_of_the_same_job_is_what_was_measured(layout, slower, tmp_path):
    config = from_tables({**JOB, "layout": layout})
    accumulation = 8 // config.layout.data
    total, measured = measure(forecast(config, config.layout, 4, accumulation, HERE)["step_seconds"], slower)
    found = HERE
    for _ in range(2):  # the same run once more changes nothing
        found, _ = calibrate(
            found, forecast(config, config.layout, 4, accumulation, found)["step_seconds"], measured
        )
        path = tmp_path / "cluster.toml"
        path.write_text(write_cluster(found))
        again = forecast(config, config.layout, 4, accumulation, read_cluster(path, CLUSTERS))
        assert again["step_seconds"]["total"] == pytest.approx(total, rel=1e-4)


FILE = """\
# Two nodes in the cellar, measured by hand.
preset = "h100"
nodes = 2
corrections_here

[between]
bandwidth_gb_s = 10  # one cable
latency_us = 20
"""


@pytest.mark.parametrize("old", ["", "[corrections]  # of last week\nmatmul = 3.0\ndata = 2.0\n"])
def test_a_file_keeps_its_comments_and_figures_and_gets_the_new_factors(old, tmp_path):
    path = tmp_path / "cellar.toml"
    path.write_text(FILE.replace("corrections_here", old))
    cluster = replace(read_cluster(path, CLUSTERS), corrections={"matmul": 1.25, "optimizer": 0.5})
    text = corrected_text(path.read_text(), cluster)
    assert "measured by hand" in text
    assert "# one cable" in text
    assert tomllib.loads(text)["corrections"] == {"matmul": 1.25, "optimizer": 0.5}
    path.write_text(text)
    assert read_cluster(path, CLUSTERS) == cluster


def test_factors_written_inline_are_replaced_too(tmp_path):
    path = tmp_path / "cellar.toml"
    path.write_text(FILE.replace("corrections_here", "corrections = { matmul = 3.0 }"))
    cluster = replace(read_cluster(path, CLUSTERS), corrections={"matmul": 1.25})
    path.write_text(corrected_text(path.read_text(), cluster))
    assert read_cluster(path, CLUSTERS).corrections == {"matmul": 1.25}
