"""Every driver of the registry answers the whole interface, and nobody outside of the drivers' room asks
which one it is."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.config import Config
from shardwise.drivers.driver import Driver, RankDriver
from shardwise.drivers.registry import DRIVERS, driver_named
from shardwise.section import Section

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "shardwise/drivers"


def public(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_answers_the_whole_interface_and_nothing_else(name: str) -> None:
    driver = driver_named(name)
    assert isinstance(driver, Driver)
    assert driver.name == name
    assert driver.summary
    own = {key for kind in type(driver).__mro__ if issubclass(kind, Driver) for key in public(kind)}
    declared = set(public(Driver)) | {"name", "summary"}
    assert own <= declared, f"not in the interface: {own - declared}"
    assert type(driver).on_rank is not Driver.on_rank
    if driver.has_loose_workers:
        assert type(driver).loose_worker is not Driver.loose_worker


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_on_a_rank_answers_the_whole_interface(name: str) -> None:
    driver = type(driver_named(name))
    rank = getattr(sys.modules[driver.__module__], inspect.signature(driver.on_rank).return_annotation)
    assert issubclass(rank, RankDriver)
    assert rank.source is not RankDriver.source
    for key, value in public(RankDriver).items():
        if inspect.isfunction(value):
            parameters = inspect.signature(getattr(rank, key)).parameters
            assert parameters == inspect.signature(value).parameters, key


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_has_its_table_in_a_job_and_rules_that_name_tables(name: str) -> None:
    driver, tables = driver_named(name), Config.model_fields
    assert (name in tables) == (driver.settings is not None)
    if driver.settings is not None:
        assert issubclass(driver.settings, Section)
        assert tables[name].annotation is driver.settings
        assert tables[name].description == driver.settings_summary != ""
    for rule in driver.rules:
        assert set(inspect.signature(rule).parameters) <= set(tables), rule


def test_asking_a_driver_needs_no_torch() -> None:
    asks = "import sys, shardwise.drivers.registry as r; r.drivers(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asks], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"shardwise.drivers.local", "shardwise.drivers.server"} <= loaded
    assert not {"torch", "numpy", "shardwise.train", "shardwise.config"} & loaded


def outside() -> Iterator[tuple[Path, ast.AST]]:
    """Every syntax node of the package outside of the drivers' room."""
    for path in sorted((ROOT / "shardwise").rglob("*.py")):
        if ROOM not in path.parents and "templates" not in path.parts:
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())))


def is_driver(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "driver"


def test_nobody_outside_compares_the_name_of_a_driver() -> None:
    compared = [
        f"{path}:{node.lineno}"
        for path, node in outside()
        if (isinstance(node, ast.Compare) and any(map(is_driver, [node.left, *node.comparators])))
        or (isinstance(node, ast.Match) and is_driver(node.subject))
    ]
    assert not compared


def test_nobody_outside_reads_the_table_of_a_driver() -> None:
    tables = {name for name in DRIVERS if driver_named(name).settings is not None}
    read = [
        f"{path}:{node.lineno}"
        for path, node in outside()
        if isinstance(node, ast.Attribute)
        and node.attr in tables
        and (getattr(node.value, "attr", None) or getattr(node.value, "id", None)) == "config"
    ]
    assert not read
