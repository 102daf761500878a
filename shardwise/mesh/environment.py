"""How this process was launched, and its place among its peers.

This is the only module that reads environment variables. There are three cases:

- *alone*: a user typed a command. shardwise starts the workers of this machine itself.
- *node*: something started one process on each node (srun with one task per node, or a Kubernetes operator
  that sets PET_* for torchrun). shardwise starts the workers of this node and connects to the other nodes.
- *worker*: one process per device is already running (torchrun, or srun with one task per device). This
  process only joins the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.errors import UserError


@dataclass(frozen=True)
class Worker:
    """One worker process, with the numbers that the launcher gave it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    launcher: str
    generation: int = 0
    """Number of the team that the worker is in, counted by shardwise's own launcher. Other launchers have one
    team.
    """
    store_name: str = ""
    """Prefix under which the teams of this run find each other in the store."""
    server_key: bytes = field(default=b"", repr=False)
    """Key by which a parameter server and its workers recognise each other. It is never sent over a network.
    """


@dataclass(frozen=True)
class Node:
    """One node of several. This process starts the workers of the node."""

    nodes: int
    node_rank: int
    workers: int | None
    address: str
    port: int
    run_id: str
    """Name that the launcher gave the run; empty if it gave none."""
    launcher: str
    secret: str | None = field(default=None, repr=False)
    """Secret by which the nodes of this run recognise each other, if the user set one (SHARDWISE_SECRET)."""


ALONE: Literal["alone"] = "alone"
GIVEN_INTERFACES = {name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
"""Variables in which the user named a network interface. shardwise does not change these."""
MIN_SECRET_LENGTH = 16
"""Minimum number of characters of a secret, so that nobody guesses it."""
LaunchMode = Worker | Node | Literal["alone"]


def launch_mode(environment: Mapping[str, str] | None = None) -> LaunchMode:
    """Return how this process was started, according to its environment variables."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        return _slurm(env)
    if "PET_NNODES" in env or "PET_MASTER_ADDR" in env or "PET_RDZV_ENDPOINT" in env:
        return _pet(env)
    return ALONE


def _torchrun(env: Mapping[str, str]) -> Worker:
    return Worker(
        rank=_number(env, "RANK"),
        world=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world=_number(env, "LOCAL_WORLD_SIZE", 1),
        address=env.get("MASTER_ADDR", "localhost"),
        port=_number(env, "MASTER_PORT", 29500),
        launcher="torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Worker | Node:
    tasks = _number(env, "SLURM_NTASKS", 1)
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    port = _number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000)
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    address = env.get("MASTER_ADDR", first_host(hosts))
    if tasks == nodes:
        run_id = f"slurm-{env.get('SLURM_JOB_ID', '0')}-{env['SLURM_STEP_ID']}"
        node_rank = _number(env, "SLURM_NODEID", 0)
        return Node(nodes, node_rank, None, address, port, run_id, "srun, one process a node", _secret(env))
    return Worker(
        rank=_number(env, "SLURM_PROCID"),
        world=tasks,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_world=_tasks_on_this_node(env, tasks) or max(1, tasks // nodes),
        address=address,
        port=port,
        launcher="srun, one process a device",
    )


def _tasks_on_this_node(env: Mapping[str, str], tasks: int) -> int | None:
    """Return the number of tasks on this node, from a list such as `4(x2),3`; None if Slurm gave no list of
    all `tasks`."""
    listed = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if sum(counts) == tasks and node < len(counts) else None


def _pet(env: Mapping[str, str]) -> Node:
    nodes = env.get("PET_NNODES", "1").split(":")[-1]  # a range such as `2:4` means up to 4
    address, port = _address_and_port(env.get("PET_RDZV_ENDPOINT", ""))
    workers = env.get("PET_NPROC_PER_NODE", "")
    return Node(
        nodes=_number({"PET_NNODES": nodes}, "PET_NNODES"),
        node_rank=_number(env, "PET_NODE_RANK", 0),
        workers=int(workers) if workers.isdigit() else None,
        address=address or env.get("PET_MASTER_ADDR", "localhost"),
        port=int(port) if port.isdigit() else _number(env, "PET_MASTER_PORT", 29400),
        run_id=env.get("PET_RDZV_ID", ""),
        launcher="PET_* variables",
        secret=_secret(env),
    )


def _address_and_port(endpoint: str) -> tuple[str, str]:
    """Return the address of an endpoint such as `node:29400`, `[fd00::1]:29400` or `fd00::1`, and the port,
    which is empty if there is none."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", endpoint)
    if bracketed:
        return bracketed[1], bracketed[2] or ""
    if endpoint.count(":") > 1:  # an IPv6 address without a port
        return endpoint, ""
    address, _, port = endpoint.partition(":")
    return address, port


def _secret(env: Mapping[str, str]) -> str | None:
    secret = env.get("SHARDWISE_SECRET")
    if secret is not None and len(secret) < MIN_SECRET_LENGTH:
        problem = f"environment variable SHARDWISE_SECRET has {len(secret)} characters"
        raise UserError(f"{problem}; give at least {MIN_SECRET_LENGTH}")
    return secret


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[003-006,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else nodes


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.lstrip("-").isdigit():
        raise UserError(
            f"environment variable {name} = {text!r}: expected a number; the launcher did not set it properly"
        )
    return int(text)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def threads_of_worker(workers: int) -> int:
    """Return the number of threads of each of `workers` workers on this machine.

    That is the number that the user set (OMP_NUM_THREADS), or an equal share of the cores.
    """
    # A list of numbers is for nested parallel regions, which torch does not have.
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) else max(1, cores() // workers)


def agent_has_store() -> bool:
    """Return whether torchrun's agent, which starts before its workers, holds the store that they
    connect to.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def gpus_are_hidden() -> bool:
    """Return whether the environment says that this process may not use a GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def nccl_may_share_gpus() -> bool:
    """Return whether the user lets NCCL (2.30 or newer) put several ranks of a host on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def worker_environment(workers: int) -> dict[str, str]:
    """Return the environment variables that shardwise sets for its workers: an equal share of the cores."""
    return {"OMP_NUM_THREADS": str(threads_of_worker(workers))}


def cache_folder() -> Path:
    """Return the folder in which this user's programs keep files that they can create again (XDG)."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Return the folder in which this user keeps settings of shardwise (XDG)."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def _user_folder(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The XDG specification says that a relative path must be ignored.
    base = Path(given) if Path(given).is_absolute() else Path.home() / default
    return base / "shardwise"
