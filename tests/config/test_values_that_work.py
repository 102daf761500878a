"""A layout that cannot be is refused with values that work: each of them, put in, makes a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import from_tables, layouts, read
from shardwise.errors import ConfigError

BASE: dict[str, dict[str, Any]] = {
    "model": {"layers": 6, "heads": 12, "kv_heads": 4, "hidden": 48, "head_dim": 4},
    "data": {"source": "text.txt", "sequence_length": 64},
    "train": {"global_batch": 8},
}


@pytest.fixture(autouse=True)
def _without_the_nearest_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for among thousands, and each value here is tried."""
    monkeypatch.setattr(layouts, "nearest_layout_settings", lambda *_: None)


def merged(*tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = {name for one in tables for name in one}
    return {
        name: {key: value for one in tables for key, value in one.get(name, {}).items()} for name in names
    }


def works(tables: dict[str, dict[str, Any]], key: str, value: int) -> bool:
    section, _, name = key.partition(".")
    try:
        from_tables(merged(tables, {section: {name: value}}))
    except ConfigError:
        return False
    return True


def named(problem: str) -> set[int]:
    """The values after "use": `use one of 1, 2, 4`, `use 1 or 2`, `use 1`, `use 1 to 6`."""
    found = re.search(r"use (?:one of )?(\d+(?:(?:, | or | to )\d+)*)", problem)
    assert found, problem
    numbers = [int(number) for number in re.findall(r"\d+", found[1])]
    return set(range(numbers[0], numbers[1] + 1)) if " to " in found[1] else set(numbers)


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("layout.tensor", {"layout": {"tensor": 5}}),
        ("layout.tensor", {"layout": {"tensor": 6}}),  # divides the heads, but not the key heads
        # 2 divides it, 4 does not
        ("layout.tensor", {"layout": {"tensor": 3}, "data": {"sequence_length": 66}}),
        ("layout.tensor", {"layout": {"tensor": 24, "context": 2}, "data": {"sequence_length": 60}}),
        ("layout.tensor", {"layout": {"tensor": 8, "context": 3, "attention": "ulysses"},
        "data": {"sequence_length": 72}}),
        ("layout.context", {"layout": {"context": 3}}),
        ("layout.context", {"layout": {"context": 5, "tensor": 2}, "data": {"sequence_length": 48}}),
        ("layout.context", {"layout": {"context": 5, "attention": "ulysses"}}),
        ("layout.context", {"layout": {"context": 5}, "model": {"window": 8}}),
        ("layout.pipeline", {"layout": {"pipeline": 7}}),
        ("layout.pipeline", {"layout": {"pipeline": 4, "schedule": "zbv"}}),
        ("layout.expert", {"layout": {"expert": 3}, "model": {"experts": 8, "experts_per_token": 2}}),
        ("layout.expert", {"layout": {"expert": 8, "data": 4}, "model": {"experts": 8,
        "experts_per_token": 2}}),
        ("layout.backward_shards", {"layout": {"backward_shards": 3, "data": 4, "context": 2, "zero": 3}}),
    ],
)  # fmt: skip
def test_the_values_that_a_refused_layout_names_are_all_that_work(
    key: str, tables: dict[str, dict[str, Any]]
) -> None:
    job = merged(BASE, tables)
    with pytest.raises(ConfigError) as refusal:
        from_tables(job)
    assert len(refusal.value.problems) == 1
    assert named(refusal.value.problems[0]) == {value for value in range(1, 65) if works(job, key, value)}


def test_the_batch_that_a_refused_one_is_changed_to_works_with_the_micro_batch_too() -> None:
    job = merged(BASE, {"train": {"global_batch": 20, "micro_batch": 2}, "layout": {"data": 3}})
    with pytest.raises(ConfigError, match=r"train\.global_batch = 20: .*; use 18 or 24") as refusal:
        from_tables(job)
    assert all(works(job, "train.global_batch", value) for value in named(refusal.value.problems[0]))


def test_a_sequence_is_not_made_longer_than_the_model_allows() -> None:
    job = merged(BASE, {"model": {"max_positions": 64}, "layout": {"context": 3}})
    with pytest.raises(ConfigError, match="a multiple of 6, such as 60;"):
        from_tables(job)


def test_a_tensor_axis_that_cannot_be_asks_for_no_other_sequence() -> None:
    """The sequence would be cut by another number of devices."""
    with pytest.raises(ConfigError) as refusal:
        from_tables(merged(BASE, {"layout": {"tensor": 5, "context": 3}}))
    tensor, sequence = refusal.value.problems
    assert tensor.startswith(
        "layout.tensor = 5: does not divide model.heads = 12, and heads stay whole; use one of 1, 2, 4"
    )
    assert "context 3 devices share a sequence" in sequence.replace(" x tensor 1", "")


def test_values_for_a_known_number_of_workers_are_those_that_divide_it(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\nheads = 12\nkv_heads = 12\n[data]\nsource = "x"\n')
    with pytest.raises(ConfigError, match=r"heads stay whole; use 1 or 2$"):
        read(tmp_path / "job.toml", ["layout.tensor=5"], devices=10)
