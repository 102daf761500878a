from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.mesh import ALONE, LaunchMode, Node, Worker, launch_mode, worker_environment
from shardwise.mesh.environment import first_host, threads_of_worker
from shardwise.proof.train_commands import LAUNCHERS

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29511",
}
SLURM = {
    "SLURM_JOB_ID": "41234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip
ENVIRONMENTS: dict[str, tuple[dict[str, str], LaunchMode]] = {
    "nothing": ({"HOME": "/root", "PATH": "/bin"}, ALONE),
    "torchrun": (TORCHRUN, Worker(5, 8, 1, 4, "n1", 29511, "torchrun")),
    "torchrun, least said": ({"RANK": "0", "WORLD_SIZE": "1"}, Worker(0, 1, 0, 1, "localhost", 29500,
    "torchrun")),
    "torchrun inside srun": ({**SLURM, **TORCHRUN}, Worker(5, 8, 1, 4, "n1", 29511, "torchrun")),
    "torchrun inside a PET pod": ({**TORCHRUN, "PET_NNODES": "2"}, Worker(5, 8, 1, 4, "n1", 29511,
    "torchrun")),
    "srun, one a device": (SLURM, Worker(9, 16, 1, 8, "gpu007", 21234, "srun, one process a device")),
    "srun, one a device, address given": (
        {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"},
        Worker(9, 16, 1, 8, "10.0.0.1", 5000, "srun, one process a device"),
    ),
    "srun, one a node": (
        {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        Node(2, 1, None, "gpu007", 21234, "slurm-41234-0", "srun, one process a node"),
    ),
    "srun on one node": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NNODES": "1",
        "SLURM_NODELIST": "login1"},
        Node(1, 0, None, "login1", 20007, "slurm-7-3", "srun, one process a node"),
    ),
    "srun, three tasks on the first two nodes and two on the others": (
        {**SLURM, "SLURM_NTASKS": "10", "SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2(x2)", "SLURM_TASKS_PER_NODE": "8(x4)"},
        Worker(9, 10, 1, 2, "gpu007", 21234, "srun, one process a device"),
    ),
    "srun, tasks of the first of uneven nodes": (
        {**SLURM, "SLURM_NTASKS": "5", "SLURM_PROCID": "1", "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "4,1"},
        Worker(1, 5, 1, 4, "gpu007", 21234, "srun, one process a device"),
    ),
    "srun, a list of the allocation's tasks and not of the step's": (
        {**SLURM, "SLURM_TASKS_PER_NODE": "64(x2)"},
        Worker(9, 16, 1, 8, "gpu007", 21234, "srun, one process a device"),
    ),
    "inside an sbatch script, not a step": ({"SLURM_JOB_ID": "41234", "SLURM_PROCID": "0",
    "SLURM_NTASKS": "16"}, ALONE),
    "a Kubernetes operator's PET": (
        {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "pod-0",
        "PET_MASTER_PORT": "77"},
        Node(3, 2, 8, "pod-0", 77, "", "PET_* variables"),
    ),
    "PET with a rendezvous": (
        {"PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "auto", "PET_RDZV_ENDPOINT": "pod-0:29401",
        "PET_RDZV_ID": "job-1"},
        Node(4, 0, None, "pod-0", 29401, "job-1", "PET_* variables"),
    ),
    "PET with a rendezvous at an IPv6 address": (
        {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "[fd00::1]:29401"},
        Node(2, 0, None, "fd00::1", 29401, "", "PET_* variables"),
    ),
    "PET with a rendezvous at an IPv6 address without a port": (
        {"PET_RDZV_ENDPOINT": "fd00::1"},
        Node(1, 0, None, "fd00::1", 29400, "", "PET_* variables"),
    ),
    "PET with a rendezvous at an IPv6 address in brackets": (
        {"PET_RDZV_ENDPOINT": "[fd00::1]"},
        Node(1, 0, None, "fd00::1", 29400, "", "PET_* variables"),
    ),
    "PET with a rendezvous without a port": (
        {"PET_RDZV_ENDPOINT": "pod-0"},
        Node(1, 0, None, "pod-0", 29400, "", "PET_* variables"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_how_a_process_was_started_is_read_from_its_environment(name: str) -> None:
    environment, expected = ENVIRONMENTS[name]
    assert launch_mode(environment) == expected


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_drill_removes_all_by_which_a_command_knows_its_launcher(name: str) -> None:
    environment, _ = ENVIRONMENTS[name]
    assert launch_mode({key: value for key, value in environment.items() if key not in LAUNCHERS}) == ALONE


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({**TORCHRUN, "RANK": "first"}, "RANK"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT"),
        ({**SLURM, "SLURM_NTASKS": "8(x2)"}, "SLURM_NTASKS"),
        ({"PET_NNODES": "many"}, "PET_NNODES"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "auto"}, "PET_NODE_RANK"),
    ],
)
def test_a_variable_that_is_no_number_is_named(environment: dict[str, str], variable: str) -> None:
    with pytest.raises(UserError, match=f"environment variable {variable} = .*expected a number"):
        launch_mode(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a,b,c", "a"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu[12,14-20]", "gpu12"),
        ("r1i0n[0-3]", "r1i0n0"),
        ("tux-gpu-0,tux[1-2]", "tux-gpu-0"),
        ("host.cluster.org,b", "host.cluster.org"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@given(nodes=st.integers(1, 6), devices=st.integers(2, 8), job=st.integers(0, 10**9))
def test_the_tasks_of_one_srun_agree_on_their_meeting_point_and_number_themselves(
    nodes: int, devices: int, job: int
) -> None:
    shared = {
        "SLURM_JOB_ID": str(job),
        "SLURM_NTASKS": str(nodes * devices),
        "SLURM_STEP_NUM_NODES": str(nodes),
    }
    workers = []
    for rank in range(nodes * devices):
        own = {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % devices)}
        worker = launch_mode({**shared, **own, "SLURM_STEP_NODELIST": f"n[1-{nodes}]" if nodes > 1 else "n1"})
        assert isinstance(worker, Worker)
        workers.append(worker)
    assert {(one.address, one.port, one.world, one.local_world) for one in workers} == {
        ("n1", 20000 + job % 20000, nodes * devices, devices)
    }
    assert [one.rank for one in workers] == list(range(nodes * devices))
    assert 1024 < workers[0].port < 65536


def test_our_workers_share_the_cores_and_what_the_user_set_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_environment(10**6) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(2) == {"OMP_NUM_THREADS": "7"}
    assert threads_of_worker(2) == 7


def test_a_secret_is_taken_from_the_environment_unless_it_can_be_guessed() -> None:
    node = launch_mode({"PET_NNODES": "2", "SHARDWISE_SECRET": "0123456789abcdef"})
    assert isinstance(node, Node)
    assert node.secret == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(node), "it would be seen in a log"
    with pytest.raises(UserError, match="SHARDWISE_SECRET has 3 characters; give at least 16"):
        launch_mode({"PET_NNODES": "2", "SHARDWISE_SECRET": "abc"})


def test_the_real_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_")) or name in TORCHRUN]:
        monkeypatch.delenv(name)
    assert launch_mode() == ALONE
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_mode() == Worker(1, 2, 0, 1, "localhost", 29500, "torchrun")
