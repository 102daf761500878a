"""`shardwise verify` as a user meets it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from warm import Command

from shardwise.config import AXES
from shardwise.mesh import local_gpus

Started = Callable[..., Command]
JOB = "examples/verify.toml"
FIELDS = {"pass", "layout", "dtype", "against", "steps", "loss", "worst", "parameters", "shrunk", "seconds"}


def test_json_is_all_that_goes_to_standard_output(shardwise) -> None:
    done = shardwise("verify", JOB, "layout.expert=2", "--steps", "1", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found.keys() >= FIELDS
    assert found["pass"] is True
    assert (found["layout"]["expert"], found["layout"]["data"], found["world"]) == (2, 2, 2)
    assert (found["dtype"], found["steps"], found["shrunk"]) == ("float64", 1, None)
    assert found["worst"].keys() >= {"parameter", "quantity", "relative_error"}
    assert found["worst"]["relative_error"] < 1e-9


def test_a_proof_of_one_device_against_itself_is_said_to_be_one(shardwise) -> None:
    done = shardwise("verify", JOB, "layout.data=1", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "note: the layout is one device, so it was compared with itself" in done.stderr
    assert "1 step on one device" in done.stderr
    assert "1 step on 1 process\n" in done.stderr
    assert json.loads(done.stdout)["pass"]


def test_a_layout_is_held_against_plain_torch(shardwise) -> None:
    done = shardwise("verify", JOB, "layout.expert=2", "data.reset_attention=true", "--against", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "PASS: data 2 x expert 2, zero 0, on 2 processes, 3 steps in float64: computes what plain torch "
        "computes." in done.stdout
    )


def test_a_sabotage_that_is_found_is_status_0_and_says_what_and_where(shardwise) -> None:
    done = shardwise("verify", JOB, "layout.tensor=2", "--steps", "1", "--sabotage", "drop-all-reduce")
    assert done.returncode == 0, done.stderr
    assert "the sabotage was found" in done.stderr
    assert "FAIL: tensor 2, zero 0, on 2 processes" in done.stdout
    assert "missing reduction over tensor" in done.stdout
    assert "attention_norm.weight" in done.stdout


@pytest.mark.skipif(local_gpus() == 0, reason="needs a GPU")
def test_processes_share_a_gpu_and_the_output_says_so(shardwise_of_a_user) -> None:
    workers = 2 * local_gpus()
    done = shardwise_of_a_user(
        "verify",
        JOB,
        f"layout.data={workers}",
        "layout.zero=3",
        f"train.global_batch={4 * workers}",
        "--device",
        "cuda",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on {workers} processes that share {local_gpus()} GPU" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "float8"], "float64, float32, bfloat16"),
        (["--sabotage", "everything"], "drop-all-reduce"),
        (["--against", "nobody"], "one-device, plain"),
        (["--against", "plain", "--dtype", "bfloat16"], "computes in float64 only"),
        (["layout.data=1", "--sabotage", "drop-all-reduce"], "layout.data=2"),
        (["layout.data=3"], "train.global_batch = 8"),
        (["--device", "gpu"], "run.device = 'gpu'"),
        (["--device", "cuda"], "no GPU that torch can use"),
    ],
)
def test_a_mistake_is_status_2_and_one_message(shardwise, arguments: list[str], says: str) -> None:
    done = shardwise("verify", JOB, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(started: Started, sent: signal.Signals) -> None:
    command = started("verify", JOB, "layout.data=4", "--steps", "500", "--json")
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(children) < 5:  # the server and four workers
        assert time.monotonic() < deadline, children
        children = psutil.Process(command.pid).children(recursive=True)
        time.sleep(0.05)
    time.sleep(1)
    command.send_signal(sent)
    out, errors = command.communicate(timeout=60)
    assert command.returncode == (130 if sent == signal.SIGINT else -sent)
    assert "Traceback" not in errors
    assert not out
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def pairs() -> list[list[str]]:
    axes = [axis for axis in AXES if axis != "replica"]
    alone = [[f"layout.{axis}=2"] for axis in AXES]
    return alone + [
        [f"layout.{a}=2", f"layout.{b}=2"] for index, a in enumerate(axes) for b in axes[index + 1 :]
    ]


MORE = [
    ["layout.pipeline=2", "layout.data=2", "layout.tensor=2"],
    ["layout.data=2", "layout.context=2", "layout.tensor=2"],
    ["layout.data=2", "layout.expert=2", "layout.tensor=2"],
    ["layout.pipeline=2", "layout.context=2", "layout.data=2"],
    ["layout.pipeline=2", "layout.context=2", "layout.data=2", "layout.tensor=2", "layout.expert=2"],
]


@pytest.mark.full
@pytest.mark.parametrize("layout", [*pairs(), *MORE], ids=" ".join)
def test_every_axis_every_pair_and_all_five_pass(shardwise, layout: list[str]) -> None:
    done = shardwise("verify", JOB, *layout, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["pass"]
