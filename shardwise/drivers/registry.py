"""The drivers by name (`train.driver`).

A driver is imported when it is first used, by the text of its module path. So the packages that use this
registry (the job's schema, the planner, the command line) do not import the drivers, and a driver may import
all of training.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.drivers.driver import Driver

if TYPE_CHECKING:
    from shardwise.config import Config

DRIVERS = {
    "synchronous": "shardwise.drivers.synchronous:Synchronous",
    "by-speed": "shardwise.drivers.by_speed:BySpeed",
    "server": "shardwise.drivers.server:ParameterServer",
    "local": "shardwise.drivers.local:LocalGroups",
    "hogwild": "shardwise.drivers.hogwild:Hogwild",
}
"""The class of each driver, as module:class."""


@cache
def driver_named(name: str) -> Driver:
    """Return the driver of this name."""
    module, _, kind = DRIVERS[name].partition(":")
    driver = getattr(import_module(module), kind)()
    assert isinstance(driver, Driver), f"{DRIVERS[name]} is a driver"
    return driver


def driver_of(config: Config) -> Driver:
    """Return the driver that a job asks for."""
    return driver_named(config.train.driver)


def drivers() -> list[Driver]:
    """Return all drivers in the order of the registry."""
    return [driver_named(name) for name in DRIVERS]
