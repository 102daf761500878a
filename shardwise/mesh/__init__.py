"""Ranks, axes and process groups, and how this process was launched.

The part about launching needs no torch; torch is imported when the other part is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.mesh.environment import (
    ALONE,
    LaunchMode,
    Node,
    Worker,
    cache_folder,
    cores,
    launch_mode,
    worker_environment,
)

if TYPE_CHECKING:
    from shardwise.mesh.devices import (
        device_memory,
        device_name,
        gpus_are_shared,
        local_gpus,
        machine_memory,
        uses_gpus,
    )
    from shardwise.mesh.mesh import (
        Mesh,
        abandon,
        join,
        leave,
        open_rendezvous_store,
        open_team_store,
        peer_is_gone,
    )

__all__ = [
    "ALONE",
    "LaunchMode",
    "Mesh",
    "Node",
    "Worker",
    "abandon",
    "cache_folder",
    "cores",
    "device_memory",
    "device_name",
    "gpus_are_shared",
    "join",
    "launch_mode",
    "leave",
    "local_gpus",
    "machine_memory",
    "open_rendezvous_store",
    "open_team_store",
    "peer_is_gone",
    "uses_gpus",
    "worker_environment",
]

_DEVICES = ("device_memory", "device_name", "gpus_are_shared", "local_gpus", "machine_memory", "uses_gpus")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "shardwise.mesh.devices" if name in _DEVICES else "shardwise.mesh.mesh"
    value: object = getattr(import_module(module), name)
    return value
