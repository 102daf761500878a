"""`shardwise doctor`: show what this machine has and lacks, with the command to type for what is missing.

Nothing here imports torch, unless `--devices` is given (cli/devices.py). Its version is read from the
metadata of the installed package, so the answer comes at once, even if torch is broken. GPUs are queried
through the driver's own tool.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.arguments import AsJson
from shardwise.command_name import command_name
from shardwise.library.torch_version import TORCH_TESTED, installed_version, torch_problem
from shardwise.units import GIB
from shardwise.version import __version__

_EXTRAS = {"parquet": "pyarrow", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_CACHE = ".shardwise"

State = Literal["good", "optional", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was examined: whether it is there, and what it is or what to do."""

    name: str
    state: State
    words: str


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver names it."""

    name: str
    memory_gib: float


def doctor(
    devices: Annotated[
        bool,
        typer.Option(
            "--devices",
            help="Use the GPUs (or CPU cores): links, four proofs, a drill, float8, compile. Two minutes.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Show what this machine has and lacks for training, and the install command for what is missing. Status
    1 if it cannot train."""
    if devices:
        from shardwise.cli.devices import check_and_show

        raise typer.Exit(check_and_show(json, [asdict(finding) for finding in examine()]))
    findings = examine()
    if json:
        import json as json_format

        answer = {
            "ready": not _bad(findings),
            "verdict": verdict(findings),
            "findings": [asdict(finding) for finding in findings],
        }
        print(json_format.dumps(answer, indent=2))
    else:
        _show(findings)
    raise typer.Exit(1 if _bad(findings) else 0)


def examine() -> list[Finding]:
    """Return everything that is examined, in the order in which it is shown."""
    from shardwise.mesh import cores, machine_memory

    gpus = _gpus()
    return [
        Finding("shardwise", "good", __version__),
        Finding(
            "python",
            "good",
            f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        ),
        _torch(gpus),
        Finding("cores", "good", f"{cores()} usable"),
        Finding("memory", "good", f"{machine_memory() / GIB:.1f} GiB"),
        _gpu(gpus),
        _disk(),
        _cache(),
        _compiler(),
        *(_extra(extra, package) for extra, package in _EXTRAS.items()),
    ]


def verdict(findings: list[Finding]) -> str:
    """Return the whole examination in one line."""
    bad = _bad(findings)
    if bad:
        return f"Not ready to train: see {', '.join(finding.name for finding in bad)} above."
    return f"Ready to train. Start with: {command_name()} new demo"


def _torch(gpus: list[Gpu]) -> Finding:
    problem = torch_problem()
    if problem:
        return Finding("torch", "bad", problem)
    installed = installed_version("torch") or ""
    if gpus and installed.endswith("+cpu"):
        install = f"pip install --force-reinstall torch=={TORCH_TESTED}"
        advice = f"cannot use the GPU here. Install the CUDA build: {install}"
        return Finding("torch", "bad", f"{installed} {advice}")
    return Finding("torch", "good", installed)


def _gpus() -> list[Gpu]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        lines = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = [line.rsplit(",", 1) for line in lines if "," in line]
    return [
        Gpu(name.strip(), float(memory) / 1024 if memory.strip().isdigit() else 0.0) for name, memory in pairs
    ]


def _gpu(gpus: list[Gpu]) -> Finding:
    if gpus:
        counts = {gpu: gpus.count(gpu) for gpu in gpus}
        named = [f"{n} x {gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu, n in counts.items()]
        return Finding("GPU", "good", ", ".join(named))
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding(
            "GPU", "bad", "an NVIDIA device is here, but nvidia-smi gives no answer: check the driver"
        )
    return Finding("GPU", "optional", "none found; training runs on the CPU cores")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / GIB
    space = f"{free:.1f} GiB free in this folder"
    if free >= 1:
        return Finding("disk", "good", space)
    return Finding("disk", "bad", f"{space}; checkpoints will not fit")


def _cache() -> Finding:
    """Examine the cache folder, or if it does not exist, the nearest existing folder above it, where it would
    be created."""
    folder = Path(_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    if os.access(folder, os.W_OK):
        return Finding("cache", "good", f"{_CACHE} can be written")
    advice = "work in another folder, or give data.cache=PATH and run.folder=PATH"
    return Finding("cache", "bad", f"{folder} cannot be written: {advice}")


def _compiler() -> Finding:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler:
        return Finding("C compiler", "good", compiler)
    advice = "none; torch.compile needs one: install gcc, or train with train.compile=false"
    return Finding("C compiler", "optional", advice)


def _extra(extra: str, package: str) -> Finding:
    installed = installed_version(package)
    if installed:
        return Finding(extra, "good", f"{package} {installed}")
    return Finding(extra, "optional", f"not installed; pip install 'shardwise[{extra}]'")


def _bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state == "bad"]


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    signs = {"good": ("ok", "green"), "optional": ("-", "yellow"), "bad": ("!!", "bold red")}
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        sign, style = signs[finding.state]
        grid.add_row(Text(sign, style=style), Text(finding.name, style="bold"), Text(finding.words))
    console.print(grid)
    # The line is not wrapped, so that the command in it can be copied.
    console.print(
        Text("\n" + verdict(findings), style="bold red" if _bad(findings) else "bold green"), soft_wrap=True
    )
