"""Checkpoints on disk: what counts as one, which is newest, and what it says of itself. No torch.

A checkpoint is a folder `step-N` that holds torch Distributed Checkpoint shards and `checkpoint.json`, its manifest: the step,
the model, the layout that wrote it, and size and checksum of every file. It is written under another name and renamed when
it is whole and on disk, so a folder with the right name is a whole checkpoint, and a crash at any moment leaves the
previous one untouched.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.config import Config, Model
from shardwise.errors import UserError

MANIFEST = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    model: dict[str, Any]
    train: dict[str, Any]
    data: dict[str, Any]
    layout: dict[str, Any]
    loss_scale: dict[str, Any]
    world: int
    torch: str
    files: dict[str, dict[str, int]]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """As checkpoint.json in that folder."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, with its files' sizes compared against the disk."""
    path = folder / MANIFEST
    try:
        manifest = Manifest(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Remove {folder} to resume from an older checkpoint.") from None
    if manifest.format != FORMAT:
        raise UserError(f"{folder} has checkpoint format {manifest.format}; this version of shardwise reads {FORMAT}")
    for name, facts in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != facts["bytes"]:
            state = "is missing" if found is None else f"has {found} bytes instead of {facts['bytes']}"
            raise UserError(f"{folder / name} {state}. Remove {folder} to resume from an older checkpoint.")
    return manifest


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [(int(match[1]), path) for path in (run / "checkpoints").glob("step-*") if (match := _STEP.match(path.name))]
    return [path for _, path in sorted(found)]


_STEP = re.compile(r"step-(\d+)$")


def to_resume(config: Config) -> Path | None:
    """The checkpoint this job starts from, checked to belong to it; None for a fresh start."""
    wanted = config.checkpoint.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        found = checkpoints(Path(config.run.folder))
        path = found[-1] if found else None
    else:
        path = Path(wanted)
        if not path.is_dir():
            raise UserError(f"checkpoint.resume = {wanted!r}: no such folder; give a step-N folder, 'auto' or 'never'")
    if path is not None:
        _check_same_model(path, read_manifest(path), config.model)
    return path


def _check_same_model(path: Path, manifest: Manifest, model: Model) -> None:
    asked = model.model_dump(exclude={"preset"})
    # A key that the checkpoint does not know came later, and its default is what was done before.
    held = {key: manifest.model.get(key, Model.model_fields[key].default) for key in asked}
    differing = [f"{key} (checkpoint {held[key]!r}, job {value!r})" for key, value in asked.items() if held[key] != value]
    if differing:
        raise UserError(
            f"{path} holds another model: model.{', model.'.join(differing)}. "
            "Use another run.folder, or checkpoint.resume=never to start afresh."
        )


def set_aside(run: Path, after: int = -1) -> Path | None:
    """Move checkpoints later than step `after` out of the way of a run that goes on from there; none touches the other."""
    later = [path for path in checkpoints(run) if int(path.name.removeprefix("step-")) > after]
    if not later:
        return None
    moved = next(path for number in itertools.count(1) if not (path := run / f"checkpoints.old-{number}").exists())
    moved.mkdir()
    for path in later:
        path.rename(moved / path.name)
    return moved


def checksum(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc = size = 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what saves that never finished left behind."""
    for path in [*checkpoints(run)[:-keep], *(run / "checkpoints").glob(".step-*")]:
        shutil.rmtree(path, ignore_errors=True)
