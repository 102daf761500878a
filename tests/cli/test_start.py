"""What happens before the first worker: what the command imports, and that a refused job starts nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from shardwise.cli import train as command
from shardwise.cli.probe import _probe
from shardwise.config import read
from shardwise.errors import UserError
from shardwise.library import start
from shardwise.library.drill_job import drill_job
from shardwise.library.prove_job import prove_job
from shardwise.mesh import Node
from shardwise.resilience.first_node_file import FirstNodeFile
from shardwise.resilience.stopping import STOP_SIGNALS
from shardwise.resilience.team import Bounds
from shardwise.train import launch

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples/quickstart.toml"

UP_TO_THE_SERVER = """
import sys
import shardwise.train.launch as launch

def stop(preload):
    print(*sys.modules)
    sys.exit(0)

launch.start_server = stop
sys.argv = ["shardwise", "train", *sys.argv[1:]]
from shardwise.cli.main import main
main()
"""


def test_the_command_needs_no_torch_before_its_workers_start(tmp_path: Path) -> None:
    words = [str(JOB), "layout.data=2", "train.steps=1", f"run.folder={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-c", UP_TO_THE_SERVER, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    imported = set(done.stdout.split())
    assert "shardwise.resilience.host" in imported, done.stderr
    assert not imported & {
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "sympy",
        "transformers",
        "tensorboard",
        "pyarrow",
    }


SCRIPT_WITHOUT_A_GUARD = """
import sys
import torch

with open(f"{sys.argv.pop()}/runs_of_this_script", "a") as log:
    log.write("one\\n")
if torch.cuda.is_available():
    torch.ones(1, device="cuda")
sys.argv = ["shardwise", "train", *sys.argv[1:]]
from shardwise.cli.main import main
main()
"""


@pytest.mark.full
@pytest.mark.parametrize("layout", ["layout.data=2", "layout.data=1"])
def test_a_script_that_has_used_cuda_and_has_no_guard_trains(tmp_path: Path, layout: str) -> None:
    """Workers must not be forks of a process that has used CUDA, and must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_WITHOUT_A_GUARD)
    words = [str(JOB), layout, "train.steps=1", "train.warmup=0", f"run.folder={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, str(script), *words, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs_of_this_script").read_text() == "one\n"


def refuse_train(*overrides: str, **options: Any) -> Callable[[Path], object]:
    return lambda folder: start.start(
        JOB,
        [*overrides, f"run.folder={folder}/run"],
        options.get("workers"),
        (options.get("least"), options.get("most")),
    )


@pytest.mark.parametrize(
    "call",
    [
        refuse_train("train.stpes=3"),
        refuse_train("data.source=nowhere.txt"),
        refuse_train("model.vocabulary=100"),
        refuse_train("checkpoint.resume=nowhere"),
        refuse_train("layout.data=4", workers=2),
        refuse_train("layout.data=2", least=3, most=2),
        refuse_train("layout.data=2", "checkpoint.folder=memory://x"),
        refuse_train("layout.data=2", "model.hidden=100000", "model.layers=100"),
        lambda folder: prove_job(JOB, ["layout.tensor=3", "layout.data=1"], 1, "float64", None, "one-device"),
        lambda folder: prove_job(JOB, ["layout.data=2"], 1, "float64", "misroute-token", "one-device"),
        lambda folder: drill_job(JOB, ["layout.data=2", f"run.folder={folder}/run"], "fire", 1, 0, None),
        lambda folder: _probe(None, folder / "nowhere" / "cluster.toml", True),
    ],
)
def test_a_refused_job_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Callable[[Path], object]
) -> None:
    """A server that imports torch would hold the command's pipes open for seconds after its message."""
    monkeypatch.setattr(forkserver, "ensure_running", lambda: pytest.fail("a server was started"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        call(tmp_path)


@pytest.mark.parametrize(
    ("data", "workers", "least", "most", "here", "bounds"),
    [
        (4, None, None, None, 4, Bounds(4, 4)),
        (4, None, 2, None, 4, Bounds(2, 4)),
        (-1, 2, None, None, 2, Bounds(2, 2)),
        (-1, None, 1, 3, 3, Bounds(1, 3)),
        (-1, None, None, 3, 3, Bounds(3, 3)),
    ],
)
def test_all_workers_are_needed_unless_fewer_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: int,
    workers: int | None,
    least: int | None,
    most: int | None,
    here: int,
    bounds: Bounds,
) -> None:
    started: list[tuple[int, Bounds]] = []
    monkeypatch.setattr(
        launch, "launch", lambda config, here, bounds, *_: started.append((here, bounds)) or 0
    )
    monkeypatch.setattr(start, "_check_data", lambda config: None)
    overrides = [
        f"layout.data={data}",
        "layout.tensor=1",
        "train.global_batch=12",
        f"run.folder={tmp_path}/run",
    ]
    assert start.start(JOB, overrides, workers, (least, most)) == 0
    assert started == [(here, bounds)]


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("sent", STOP_SIGNALS)
def test_a_command_that_is_stopped_before_its_workers_start_says_by_whom(
    monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(command, "start", lambda *_: os.kill(os.getpid(), sent))
    with pytest.raises(typer.Exit) as left:
        command.train(JOB)
    assert left.value.exit_code == (130 if sent == signal.SIGINT else 75)
    os.kill(os.getpid(), sent)  # as many senders do: it changes nothing any more


EARLY = """
import os, signal, sys
class SignalAt:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), int(sys.argv[3]))
sys.meta_path.insert(0, SignalAt())
"""
ENTRIES = [
    "from shardwise.cli.main import main; main()",
    "import runpy; runpy.run_module('shardwise', run_name='__main__')",
]


@pytest.mark.parametrize("entry", ENTRIES, ids=["script", "module"])
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_run_that_is_stopped_while_it_imports_its_first_modules_says_so(
    entry: str, sent: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-c", EARLY + entry, "train", "job.toml", str(int(sent))]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (status, "stopped at once; what was saved is kept\n")


INSIDE_EXEC = """
import os, signal
from shardwise.cli import train
from shardwise.cli.main import main
train.start = lambda *_: exec("os.kill(os.getpid(), signal.SIGTERM); pass")
main()
"""


def test_a_run_that_is_stopped_inside_an_exec_ends_with_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "stopped_run.py").write_text(INSIDE_EXEC)
    command = [sys.executable, "-m", "stopped_run", "train", str(JOB)]
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "stopped at once; what was saved is kept\n")


def test_limits_that_are_too_low_for_a_run_are_named_before_anything_is_written(tmp_path: Path) -> None:
    low = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (48, 48)); r.setrlimit(r.RLIMIT_AS, (900 << 20, "
        "900 << 20))"
    )
    run = ["train", str(JOB), "layout.data=2", f"run.folder={tmp_path}/run", f"data.cache={tmp_path}/cache"]
    command = [sys.executable, "-c", f"{low}; {ENTRIES[0]}", *run]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert [line.partition("ulimit ")[2] for line in ended.stderr.splitlines()] == ["-n 4096", "-v unlimited"]
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_was_not_stopped_leaves_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    monkeypatch.setattr(command, "start", lambda *_: 0)
    with pytest.raises(typer.Exit):
        command.train(JOB)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_nodes_meet_at_an_address_that_other_machines_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str, first: tuple[str, int], *_: object) -> None:
        raise UserError(f"the first node is at {first}")

    monkeypatch.setattr(launch, "start_server", lambda preload: None)
    monkeypatch.setattr(launch, "address_for_other_machines", lambda name: f"the address of {name}")
    monkeypatch.setattr(launch, "Leadership", stop)
    node = Node(2, 0, 1, "node-1", 29400, "run", "a test")
    with pytest.raises(UserError, match=r"the first node is at \('the address of node-1', 29400\)"):
        launch.launch(read(JOB, []), 1, Bounds(1, 2), node, cast(Any, None), nullcontext)


def test_hosts_compare_every_setting_of_the_job() -> None:
    one, other = (
        launch._settings(read(JOB, ["train.steps=7", *more])) for more in ([], ["data.text_field=answer"])
    )
    assert (one["train.steps"], one["run.folder"]) == ("7", '"runs/quickstart"')
    assert {name for name in one if one[name] != other[name]} == {"data.text_field"}
    long = [launch._settings(read(JOB, [f"run.folder={'x' * 200}{end}"]))["run.folder"] for end in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 120


def test_a_first_node_that_cannot_begin_leaves_the_reason_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        start, "_check_data", lambda config: pytest.fail("hours may pass before the name is looked up")
    )
    node = Node(2, 0, 1, "n1.invalid", 20001, "slurm-1-0", "a test")
    config = read(JOB, [f"run.folder={tmp_path / 'run'}", "layout.data=2"])
    with pytest.raises(UserError, match=r"the name n1\.invalid, .*, cannot be resolved"):
        start._start(config, node, None, (None, None))
    sign = FirstNodeFile(tmp_path / "run", "slurm-1-0").status_of_this_run()
    assert sign is not None
    assert "the name n1.invalid" in sign.ended
    assert sign.status == 2
