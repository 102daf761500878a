"""Who started this process, and who are its peers.

This is the only module that reads environment variables. Three situations exist:

- *alone*: someone typed a command. We start the local workers ourselves.
- *node*: something started one process on each node (srun with one task a node, or a Kubernetes operator that
  sets PET_* for torchrun). We start the local workers and meet the other nodes.
- *worker*: one process a device already runs (torchrun, or srun with one task a device). We only join.
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
    """One worker among its peers, as the launcher numbered it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    launcher: str
    generation: int = 0
    """Of the team it is in, where our own launcher formed one."""
    store_name: str = ""
    """Under which the teams of this run find each other in the store."""


@dataclass(frozen=True)
class Node:
    """One node of several; its workers are ours to start."""

    nodes: int
    node_rank: int
    workers: int | None
    address: str
    port: int
    run_id: str
    """As the launcher names the run; empty where it does not."""
    launcher: str
    secret: str | None = field(default=None, repr=False)
    """By which the nodes of this run know each other, where the user gave one (SHARDWISE_SECRET)."""


ALONE: Literal["alone"] = "alone"
GIVEN_INTERFACES = {name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
"""Variables in which the user has named a network interface: these are obeyed."""
LEAST_SECRET = 16
"""Characters of a secret that nobody guesses."""
Launched = Worker | Node | Literal["alone"]


def launched(environment: Mapping[str, str] | None = None) -> Launched:
    """How this process was started."""
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
        local_world=max(1, tasks // nodes),
        address=address,
        port=port,
        launcher="srun, one process a device",
    )


def _pet(env: Mapping[str, str]) -> Node:
    nodes = env.get("PET_NNODES", "1").split(":")[-1]  # `2:4`, a range, means up to 4
    address, _, port = env.get("PET_RDZV_ENDPOINT", "").partition(":")
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


def _secret(env: Mapping[str, str]) -> str | None:
    secret = env.get("SHARDWISE_SECRET")
    if secret is not None and len(secret) < LEAST_SECRET:
        raise UserError(
            f"environment variable SHARDWISE_SECRET has {len(secret)} characters; give at least "
            f"{LEAST_SECRET}"
        )
    return secret


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[003-006,9],login1`."""
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
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def threads_of_worker(workers: int) -> int:
    """Threads that each of so many workers on this machine computes with: what the user set, or a fair share
    of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[
        0
    ]  # a list is for nested regions, of which torch has none
    return int(given) if given.isdigit() and int(given) else max(1, cores() // workers)


def agent_has_store() -> bool:
    """Whether torchrun's agent, who is there before its workers are, has the store in which they meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def gpus_are_hidden() -> bool:
    """Whether the environment says that this process may use no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def worker_environment(workers: int) -> dict[str, str]:
    """What our own workers need in their environment: a fair share of the cores."""
    return {"OMP_NUM_THREADS": str(threads_of_worker(workers))}


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again (the XDG base directories)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = (
        Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    )  # a relative one is to be ignored
    return base / "shardwise"
