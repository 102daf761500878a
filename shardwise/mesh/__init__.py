"""Ranks, axes, groups; finding out how we were launched."""

from shardwise.mesh.devices import cores, device_memory, device_name, local_gpus
from shardwise.mesh.launched import ALONE, Launched, Node, Worker, launched, worker_environment
from shardwise.mesh.mesh import RANK_AXES, Mesh, join, leave

__all__ = [
    "ALONE",
    "RANK_AXES",
    "Launched",
    "Mesh",
    "Node",
    "Worker",
    "cores",
    "device_memory",
    "device_name",
    "join",
    "launched",
    "leave",
    "local_gpus",
    "worker_environment",
]
