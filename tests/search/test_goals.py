"""Goals: what is found works, the next better does not, and easier wishes never cost more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cli.plain_data import plain_data
from shardwise.config import Config, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.errors import UserError
from shardwise.search.fewest import _least, fewest_devices, smallest_that_fits
from shardwise.search.largest import largest_batch, longest_sequence
from shardwise.search.scaling import strong
from shardwise.search.search import search
from shardwise.units import GIB

DAY = 86_400.0


def job(length: int = 1024, layout: dict[str, Any] | None = None, **train: Any) -> Config:
    return from_tables(
        {
            "model": {
                "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 4096,
                "vocabulary": 32000,
            },
            "data": {"source": "text.txt", "sequence_length": length},
            "train": {"global_batch": 48, "precision": "bfloat16", "steps": 100_000, **train},
            "layout": layout or {},
        }
    )  # fmt: skip


def job_without_stages() -> Config:
    """A search over many devices tries few layouts of it, so that it takes a moment."""
    return job(2048, {"pipeline": 1, "context": 1})


def of_memory(gib: float, offload: bool = True) -> Cluster:
    """H100 nodes with so much memory a device; without host memory nothing is offloaded."""
    cluster = named("h100")
    device = replace(cluster.device, memory=gib * GIB, overhead=0.5 * GIB)
    return replace(cluster, device=device, host_memory=cluster.host_memory if offload else 1.0)


def days_on(config: Config, devices: int) -> float:
    result = search(config, named("h100").with_devices(devices), devices)
    return config.train.steps * float(result.total[result.order[0]]) / DAY


# -- devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 9, 64, 100])
def test_the_least_of_many_counts_that_works_is_found_in_few_tries(nodes: int) -> None:
    counts = [8 * node for node in range(1, nodes + 1)]
    for least in counts:
        tried: list[int] = []
        assert _least(counts, lambda devices: tried.append(devices) or devices >= least) == least  # noqa: B023
        assert len(tried) <= nodes.bit_length() + 4, "a bisection, and the few right below"


def test_the_fewest_devices_are_in_time_and_what_was_tried_below_is_not() -> None:
    wanted = 1.01 * days_on(job(), 4)
    found = fewest_devices(job(), named("h100"), wanted, most=64)
    assert found.devices is not None
    assert found.devices <= 4
    assert found.days is not None
    assert found.days <= wanted
    assert found.days == pytest.approx(days_on(job(), found.devices))
    below = [one for one in found.tried if one.devices < found.devices]
    assert below
    assert all(one.days is None or one.days > wanted for one in below)


def test_more_days_never_need_more_devices() -> None:
    config = job_without_stages()
    base = days_on(config, 8)
    needed = [
        fewest_devices(config, named("h100"), share * base, most=64).devices or 10**9
        for share in (0.3, 0.6, 1.05, 2.5, 12)
    ]
    assert needed == sorted(needed, reverse=True)
    assert needed[-1] == 1


def test_counts_between_powers_of_two_are_whole_nodes_that_divide() -> None:
    config = job_without_stages()
    wanted = 1.03 * days_on(config, 24)  # three nodes: 48 sequences divide over them
    found = fewest_devices(config, named("h100"), wanted, most=64)
    assert found.devices is not None
    assert found.devices % 8 == 0
    assert 16 < found.devices <= 24


def test_tokens_take_the_place_of_steps() -> None:
    tokens = 100_000 * 48 * 1024
    wanted = 1.05 * days_on(job(), 2)
    assert (
        fewest_devices(job(steps=7), named("h100"), wanted, tokens, 8).devices
        == fewest_devices(job(), named("h100"), wanted, most=8).devices
    )


def test_a_wish_nothing_can_meet_says_what_the_best_is() -> None:
    found = fewest_devices(job_without_stages(), named("h100"), 1e-6, most=16)
    assert found.devices is None
    assert found.days is not None
    assert found.days > 1e-6
    assert "cannot train this in 1e-06 days" in found.sentence
    assert plain_data(found)["tried"][-1]["devices"] == 16


def test_a_model_no_count_can_hold_says_so() -> None:
    found = fewest_devices(job(), of_memory(0.55, offload=False), 1000, most=8)
    assert found.devices is None
    assert found.days is None
    assert "nothing fits" in found.sentence


@pytest.mark.parametrize("days", [0, -1, float("inf"), float("nan")])
def test_days_must_be_a_number_above_zero(days: float) -> None:
    with pytest.raises(UserError, match="above 0"):
        fewest_devices(job(), named("h100"), days)


def test_the_smallest_cluster_that_fits_fits_and_half_of_it_does_not() -> None:
    cluster = of_memory(1.7, offload=False)
    found = smallest_that_fits(job(), cluster, most=64)
    assert found.devices is not None
    assert found.devices > 1
    assert found.without_offload == found.devices
    assert found.peak_gib is not None
    assert found.peak_gib <= found.limit_gib
    assert not len(search(job(), cluster.with_devices(found.devices // 2), found.devices // 2).order)


def test_more_memory_never_needs_more_devices() -> None:
    needed = [
        smallest_that_fits(job(), of_memory(gib, offload=False), most=64).devices or 10**9
        for gib in (0.55, 1.5, 2.5, 5, 80)
    ]
    assert needed == sorted(needed, reverse=True)
    assert (needed[0], needed[-1]) == (10**9, 1)


def test_offloading_is_told_apart_from_fitting() -> None:
    found = smallest_that_fits(job(), of_memory(1.7), most=64)
    alone = smallest_that_fits(job(), of_memory(1.7, offload=False), most=64)
    assert found.devices is not None
    assert found.without_offload is not None
    assert found.devices <= found.without_offload
    assert found.without_offload == alone.devices


# -- the margin ----------------------------------------------------------------------------------------------


def with_margin(margin: float) -> Config:
    config = job()
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"margin": margin})})


def test_every_goal_leaves_the_margin_free_that_the_job_asks_for() -> None:
    cluster, usual, wide = of_memory(4, offload=False), with_margin(0.08), with_margin(0.6)
    few, many = (smallest_that_fits(config, cluster, most=64) for config in (usual, wide))
    assert few.devices == 1
    assert many.devices is not None
    assert many.devices > 1
    assert many.limit_gib == pytest.approx(4 * 0.4)
    quick, slow = (fewest_devices(config, cluster, 1000.0, most=8) for config in (usual, wide))
    assert quick.devices == 1
    assert slow.devices is not None
    assert slow.devices >= many.devices
    assert longest_sequence(usual, cluster, 4).length > longest_sequence(wide, cluster, 4).length
    assert largest_batch(usual, cluster, 4).global_batch > largest_batch(wide, cluster, 4).global_batch
    assert [strong(config, cluster, [1])[0].works for config in (usual, wide)] == [True, False]


# -- sequence and batch --------------------------------------------------------------------------------------


def test_the_longest_sequence_fits_and_one_step_more_does_not() -> None:
    cluster = of_memory(4, offload=False)
    found = longest_sequence(job(), cluster, 1)
    assert found.length >= 1024
    assert found.result is not None
    assert found.job.data.sequence_length == found.length <= found.job.model.max_positions
    assert float(found.result.peak[found.result.order[0]]) <= found.result.limit
    step = 1024 if found.length >= 2048 else 128
    longer = found.job.model_copy(
        update={"data": found.job.data.model_copy(update={"sequence_length": found.length + step})}
    )
    assert not len(search(longer, cluster.with_devices(1), 1).order)


def test_a_longer_sequence_has_no_more_tokens_a_step_and_a_batch_that_divides() -> None:
    found = longest_sequence(job(), of_memory(4, offload=False), 2)
    assert 48 % found.global_batch == 0
    assert found.global_batch == 1 or found.global_batch * found.length <= 48 * 1024


def test_with_more_memory_or_devices_the_longest_sequence_is_not_shorter() -> None:
    lengths = [longest_sequence(job(), of_memory(gib, offload=False), 1).length for gib in (3, 4, 6, 12)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert longest_sequence(job(), of_memory(4, offload=False), 4).length >= lengths[1]


def test_where_the_job_itself_is_too_long_a_shorter_one_is_found() -> None:
    cluster = of_memory(4, offload=False)
    longest = longest_sequence(job(), cluster, 1).length
    long = from_tables(
        {
            "model": {**job().model.model_dump(exclude_none=True), "max_positions": 2**24},
            "data": {"source": "text.txt", "sequence_length": 2**24},
            "train": {"global_batch": 1, "precision": "bfloat16"},
        }
    )
    found = longest_sequence(long, cluster, 1)
    assert 0 < found.length <= longest + 1024


def test_where_nothing_fits_the_length_is_nought_with_a_reason() -> None:
    found = longest_sequence(job(), of_memory(0.55, offload=False), 1)
    assert found.length == 0
    assert plain_data(found)["step_seconds"] is None
    assert "nothing fits" in found.sentence


def test_the_largest_batch_fits_in_one_go_and_a_larger_does_not() -> None:
    cluster = of_memory(6, offload=False)
    found = largest_batch(job(), cluster, 2)
    assert found.global_batch == found.micro_batch * found.data_parallel > 0
    exact = search(found.job, cluster.with_devices(2), 2)
    assert len(exact.order) == 1
    assert int(exact.space.accumulation[0]) == 1
    assert found.step_seconds == pytest.approx(float(exact.total[0]))
    assert found.peak_gib == pytest.approx(float(exact.peak[0]) / GIB)
    for copies in (1, 2):
        more = job(global_batch=found.global_batch - found.global_batch % copies + copies)
        result = search(more, cluster.with_devices(2), 2)
        assert not any(int(result.space.accumulation[place]) == 1 for place in result.order)


def test_the_largest_batch_grows_with_memory_and_devices() -> None:
    batches = [largest_batch(job(), of_memory(gib, offload=False), 1).global_batch for gib in (1, 4, 6, 12)]
    assert batches == sorted(batches)
    assert batches[0] == 0 < batches[-1]
    assert largest_batch(job(), of_memory(6, offload=False), 4).global_batch >= batches[2]
