"""Ranks, axes, groups; finding out how we were launched. The latter needs no torch, which is imported once it
is needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.mesh.launched import (
    ALONE,
    Launched,
    Node,
    Worker,
    cache_folder,
    cores,
    launched,
    worker_environment,
)

if TYPE_CHECKING:
    from shardwise.mesh.devices import device_memory, device_name, local_gpus, on_gpus, share_gpus
    from shardwise.mesh.mesh import (
        Mesh,
        abandon,
        join,
        leave,
        meeting_place,
        open_rendezvous_store,
        peer_is_gone,
    )

__all__ = [
    "ALONE",
    "Launched",
    "Mesh",
    "Node",
    "Worker",
    "abandon",
    "cache_folder",
    "cores",
    "device_memory",
    "device_name",
    "join",
    "launched",
    "leave",
    "local_gpus",
    "meeting_place",
    "on_gpus",
    "open_rendezvous_store",
    "peer_is_gone",
    "share_gpus",
    "worker_environment",
]

_DEVICES = ("device_memory", "device_name", "local_gpus", "on_gpus", "share_gpus")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        import_module("shardwise.mesh.devices" if name in _DEVICES else "shardwise.mesh.mesh"), name
    )
