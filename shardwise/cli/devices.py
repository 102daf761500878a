"""`shardwise doctor --devices`: use the devices of this machine as training does, and show what came of it.

The checks are in proof/device_checks.py. This module shows them as one table or as JSON. If a check fails, it
packs what a developer needs to see into one file.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwise.cli.new import TEMPLATES, TEXT
from shardwise.cli.signals import stopped_as_interrupted
from shardwise.files import Json
from shardwise.resilience.stopping import INTERRUPTED

if TYPE_CHECKING:
    from shardwise.proof.device_checks import DeviceReport

ARCHIVE = Path("shardwise-doctor.tar.gz")
"""File in the present folder for the logs of checks that failed."""
LOGS = ("*.txt", "*.json", "*.log", "drill/*.log", "drill/*/logs/*", "drill/*/events.jsonl")
"""Patterns of the files that go into the archive."""


def check_and_show(as_json: bool, machine: Sequence[Json]) -> int:
    """Check the devices, print the result, and return the exit status. `machine` is what `doctor` found
    without using them; it goes into the file for developers."""
    from shardwise.library.torch_version import need_torch

    need_torch()
    _refuse_launchers()
    try:
        with stopped_as_interrupted(), tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
            report = _check(Path(folder))
            archive = _pack(Path(folder), report, machine) if report.failed else None
    except KeyboardInterrupt:
        typer.echo("stopped; nothing is left running", err=True)
        return INTERRUPTED
    answer = {**report.to_json(), "archive": None if archive is None else str(archive)}
    print(json.dumps(answer, indent=2) if as_json else "\n".join(report_lines(report, archive)))
    return 1 if report.failed else 0


def _refuse_launchers() -> None:
    from shardwise.errors import UserError
    from shardwise.mesh import Worker, launch_mode

    if isinstance(launch := launch_mode(), Worker):
        raise UserError(
            f"doctor --devices: starts workers of its own; type it once on each machine, not under "
            f"{launch.launcher}"
        )


def _check(folder: Path) -> DeviceReport:
    from shardwise.proof.device_checks import Devices, check_devices

    devices = Devices.of_this_machine()
    print(f"checking {devices.describe()}; this takes a minute or two", file=sys.stderr)

    def say(what: str) -> None:
        print(f"checking: {what}", file=sys.stderr, flush=True)

    return check_devices(devices, TEMPLATES / TEXT, folder, say)


def report_lines(report: DeviceReport, archive: Path | None) -> list[str]:
    """Return the report as text: the table, the speed of each pair, the verdict, and what to send."""
    from shardwise.library.columns import aligned
    from shardwise.plurals import counted
    from shardwise.proof.device_checks import pair_lines

    head = ["check", "result", "number", "seconds", "what it says"]
    rows = [[row.name, row.state, row.number, f"{row.seconds:.1f}", row.words] for row in report.rows]
    lines = [*aligned([head, *rows]), ""]
    if report.links is not None and len(report.links.pairs) > 1:
        lines += [*aligned(pair_lines(report.links)), ""]
    checks = f"{counted(len(report.rows), 'check')} in {report.seconds:.0f} s"
    if not report.failed:
        return [*lines, f"PASS: {checks}"]
    lines.append(f"FAIL: {', '.join(row.name for row in report.failed)}; {checks}")
    return [*lines, *_what_to_send(archive)]


def _what_to_send(archive: Path | None) -> Sequence[str]:
    if archive is None:
        return ["Send us this table and the output of `shardwise doctor`, in an issue."]
    return [
        f"Send us {archive} in an issue. It has this table, the versions, NCCL's log and the logs of the",
        "checks, with the names of this machine and of its devices. It has none of your data.",
    ]


def _pack(folder: Path, report: DeviceReport, machine: Sequence[Json]) -> Path | None:
    """Write the logs of the checks and the report to one file, and return its path; None if it cannot be
    written."""
    texts = {
        "report.json": json.dumps(report.to_json(), indent=2),
        "doctor.json": json.dumps(machine, indent=2),
    }
    files = sorted({path for pattern in LOGS for path in folder.glob(pattern) if path.is_file()})
    try:
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            for name, text in texts.items():
                entry = tarfile.TarInfo(f"shardwise-doctor/{name}")
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
            for path in files:
                archive.add(path, f"shardwise-doctor/{path.relative_to(folder)}")
    except OSError:
        return None
    return ARCHIVE
