"""A real Slurm on this machine: a controller and several virtual nodes on the loopback address.

It needs root and Debian's packages slurm-wlm and munge. It uses its own munged and its own files, so it does
not touch a Slurm that is installed here. Nothing of it is left afterwards.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
POSSIBLE = os.geteuid() == 0 and not MISSING
WHY_NOT = "a real Slurm needs root, and Debian's packages slurm-wlm and munge"
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoAddrCache
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,requeue_delay=1
ReturnToService=2
JobRequeue=1
KillWait=30
OverTimeLimit=0
InactiveLimit=0
SlurmdTimeout=300
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=FORCE:4
"""


def free_ports(number: int) -> list[int]:
    """Return TCP ports that nobody uses now."""
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


class Cluster:
    """The commands of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm, and return what it printed."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        shown = self.call("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Start a controller and this many nodes, n1, n2 and so on, and end them with all their jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    ports, host = free_ports(nodes + 1), socket.gethostname()
    lines = [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=2 "
        f"RealMemory=2000 State=UNKNOWN"
        for number in range(1, nodes + 1)
    ]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, ports=ports, folder=folder, nodes="\n".join(lines)))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    files = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "seed-file": "munge.seed",
        "pid-file": "munge.pid",
    }
    munged = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={folder / file}" for name, file in files.items()),
    ]
    daemons = [munged, ["slurmctld", "-D", "-c", "-f", str(config)]]
    daemons += [["slurmd", "-D", "-N", f"n{number}", "-f", str(config)] for number in range(1, nodes + 1)]
    with ExitStack() as running:
        for words in daemons:
            running.enter_context(_daemon(words, folder))
            time.sleep(0.5)
        cluster = Cluster(folder)
        _wait_for_nodes(cluster, nodes)
        yield cluster


def _wait_for_nodes(cluster: Cluster, nodes: int) -> None:
    deadline = time.monotonic() + 30
    while (
        cluster.call("sinfo", "--noheader", "--Node", "--format=%t", check=False).split().count("idle")
        < nodes
    ):
        assert time.monotonic() < deadline, cluster.call("sinfo", "--Node", "--long", check=False)
        time.sleep(0.2)


@contextmanager
def _daemon(words: list[str], folder: Path) -> Iterator[None]:
    """Run a daemon, and end it with all processes that it started."""
    with (folder / "daemons.log").open("a") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
