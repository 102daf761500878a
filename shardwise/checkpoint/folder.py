"""Checkpoints in a folder, and their manifests. This module needs no torch.

A checkpoint is a folder `step-N` that holds

    checkpoint.json        the manifest: the step, the model, the layout that wrote the checkpoint, and the
                           size and checksum of every file
    tensors-ID.json        where each tensor's pieces lie (checkpoint/tensor_files.py)
    rank-R-ID.data         what rank R wrote: raw tensors, one after the other

The manifest is written last, atomically, and a folder without one is no checkpoint. ID is random and new for
every save. Saving a step again therefore changes no file of the existing checkpoint, and files of a worker
that should have ended are in no manifest. A crash at any byte leaves the old checkpoint or the new one.

A flipped bit in any file is detected: the manifest holds a CRC-32 of every file and of itself. This package
unpickles nothing, so opening a checkpoint runs no code from it. Only names of the three kinds above are
accepted, so a manifest cannot name a file outside of the folder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.checkpoint.storage import Storage, parent, storage
from shardwise.config.check import problems_across
from shardwise.config.model import Model
from shardwise.errors import Unreadable, UserError, shown
from shardwise.files import is_temporary, read_sealed, seal
from shardwise.locks import take_lock
from shardwise.plans import SavedLayout

MANIFEST = "checkpoint.json"
FORMAT = 2
Table = dict[str, Any]
"""A JSON object or a table of a job, whose values are checked where they are used."""

_STEP = re.compile(r"step-(\d{1,18})")
_FILE = r"^(tensors-[0-9a-z]{1,32}\.json|rank-[0-9]{1,9}-[0-9a-z]{1,32}\.data)$"


@with_config(ConfigDict(strict=True, extra="forbid"))
class WrittenFile(TypedDict):
    """Size and checksum of a file."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


@with_config(ConfigDict(strict=True, extra="allow"))
class _SavedData(TypedDict, total=False):
    """The entries of a job's [data] that are used again."""

    tokenizer: str
    end_of_document: str | None


@with_config(ConfigDict(strict=True, extra="allow"))
class _SavedScale(TypedDict, total=False):
    """The loss scale of a run: both entries or, in a checkpoint of weights alone, none."""

    value: Annotated[float, Field(gt=0)]
    clean_steps: Annotated[int, Field(ge=0)]


def _both_or_none(scale: Table) -> Table:
    if scale and not {"value", "clean_steps"} <= scale.keys():
        raise ValueError("value and clean_steps belong together")
    return scale


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. Entries of its tables that are used again have types; the others are
    only compared and shown."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0)]
    model: Table
    train: Table
    data: Annotated[Table, GetPydanticSchema(lambda _, schema_of: schema_of(_SavedData))]
    layout: Annotated[Table, GetPydanticSchema(lambda _, schema_of: schema_of(SavedLayout))]
    loss_scale: Annotated[
        Table,
        GetPydanticSchema(lambda _, schema_of: schema_of(_SavedScale)),
        AfterValidator(_both_or_none),
    ]
    world: Annotated[int, Field(ge=1)]
    torch: str
    files: dict[Annotated[str, Field(pattern=_FILE)], WrittenFile]
    sequences: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    """Number of sequences that the run has seen, after which its data continues."""
    missing: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...] = ()
    """Ranges (first, end) of these sequences that workers of a parameter server were still computing, and
    that are not in the weights."""
    groups: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Number of groups that train separately, each with its own state beside the model's; 0: there are
    none."""
    under_way: tuple[Annotated[str, Field(max_length=1024)], ...] = ()
    """Parameters that such groups were exchanging."""
    optimizer: Table = field(default_factory=dict)
    """The [optimizer] table of the run; empty in checkpoints of older versions and of weights alone."""
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file["bytes"] for file in self.files.values())

    def encode(self) -> bytes:
        """Return the content of its file."""
        return seal(asdict(self))

    def write(self, folder: str | Path) -> None:
        """Write checkpoint.json in that folder, which makes the folder a checkpoint."""
        storage(folder).put(MANIFEST, self.encode())


def saved_model(manifest: Manifest, address: str) -> Model:
    """Return the shape of the model in a checkpoint."""
    try:
        model = Model.model_validate(manifest.model)
    except ValidationError as error:
        wrong = ", ".join(f"model.{detail['loc'][0]} = {shown(detail['input'])}" for detail in error.errors())
        raise UserError(
            f"{address} holds a model that this version of shardwise does not know: {wrong}"
        ) from None
    if problems := problems_across({"model": model}):
        raise UserError(f"{address} holds a model that cannot be: {problems[0]}")
    return model


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of a checkpoint, after comparing the sizes of its files with the storage."""
    where = storage(folder)
    manifest = _decode(_content(where), where)
    if ".metadata" in where.names():
        raise UserError(
            f"{where.address}/.metadata is a pickle, which may run code: it is no part of a checkpoint. "
            "Remove it."
        )
    for name, file in manifest.files.items():
        size = where.size(name)
        if size != file["bytes"]:
            state = "is missing" if size is None else f"has {size} bytes instead of {file['bytes']}"
            raise UserError(f"{where.address}/{name} {state}. {advice_if_damaged(where)}")
    return manifest


def _content(where: Storage) -> bytes:
    try:
        return where.read(MANIFEST)
    except FileNotFoundError:
        raise UserError(f"{where.address} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        kind = Unreadable if is_temporary(error) else UserError
        raise kind(
            f"{where.address}/{MANIFEST} cannot be read: {error}. {advice_if_damaged(where)}"
        ) from None


def advice_if_damaged(where: Storage) -> str:
    """Return the advice for a damaged checkpoint."""
    return f"Remove {where.address} to resume from an older checkpoint."


def _decode(content: bytes, where: Storage) -> Manifest:
    source = f"{where.address}/{MANIFEST}"
    manifest = read_sealed(Manifest, content, source, ("format", FORMAT), advice_if_damaged(where))
    if manifest.step and not manifest.sequences:  # older versions did not count them: each step took a batch
        batch = manifest.train.get("global_batch")
        if type(batch) is int and batch > 0:
            return replace(manifest, sequences=manifest.step * batch)
    return manifest


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run should start."""

    folder: str
    """The folder of the run's checkpoints."""
    wanted: str
    """`auto`: the newest in that folder, if any; `never`: none; or the path of a checkpoint."""
    model: Model
    """The model that the checkpoint must hold."""


def step_of(address: str) -> int:
    """Return the step of a checkpoint from its name."""
    match = _STEP.fullmatch(address.rpartition("/")[2])
    assert match, f"{address} is no checkpoint's name"
    return int(match[1])


def checkpoints(folder: str | Path) -> list[str]:
    """Return the checkpoints in a folder, oldest first: those whose save finished, damaged ones too."""
    where = storage(folder)
    steps = sorted((int(match[1]), name) for name in where.names() if (match := _STEP.fullmatch(name)))
    folders = [where.inside(name) for _, name in steps]
    return [inside.address for inside in folders if inside.size(MANIFEST) is not None]


def to_resume(resume: Resume) -> str | None:
    """Return the checkpoint from which a run will start, judged by manifests alone; None for a fresh start.

    It reads no tensors, so that it can be called before any worker starts. The workers then check every byte
    (`Checkpointer.choose_checkpoint`), and may go back to an older checkpoint.
    """
    candidates = resume_candidates(resume)
    reasons = []
    for address in candidates:
        try:
            manifest = read_manifest(address)
        except UserError as error:
            if resume.wanted != "auto":
                raise
            reasons.append(str(error))
            continue
        check_same_model(address, manifest, resume.model)
        return address
    if candidates:
        raise no_whole_checkpoint(resume.folder, reasons)
    return None


def resume_candidates(resume: Resume) -> list[str]:
    """Return the checkpoints that a run may start from, the best first."""
    wanted = resume.wanted
    if wanted == "never":
        return []
    if wanted == "auto":
        return checkpoints(resume.folder)[::-1]
    if not storage(wanted).names():
        raise UserError(
            f"checkpoint.resume = {wanted!r}: no such folder; give a step-N folder, 'auto' or 'never'"
        )
    return [wanted.rstrip("/")]


def no_whole_checkpoint(folder: str, reasons: list[str]) -> UserError:
    """Return the error for a folder whose checkpoints are all damaged. Only the user may decide to start
    afresh."""
    problems = "\n  ".join(reasons)
    return UserError(
        f"{folder} has checkpoints, but none that is whole:\n  {problems}\n"
        "Mend one, give another with checkpoint.resume=PATH, or start afresh with checkpoint.resume=never."
    )


def check_same_model(address: str, manifest: Manifest, model: Model) -> None:
    """Refuse the checkpoint of another model, and name the settings that differ."""
    wanted = model.settings()
    # A key that the checkpoint lacks is newer than it; its default is the earlier behaviour.
    saved = {key: manifest.model.get(key, Model.model_fields[key].default) for key in wanted}
    differing = [
        f"{key} (checkpoint {saved[key]!r}, job {value!r})"
        for key, value in wanted.items()
        if saved[key] != value
    ]
    if differing:
        advice = "Use another run.folder, or checkpoint.resume=never to start afresh."
        if manifest.step == 0 and not manifest.layout:  # from an import
            advice = (
                "Give the job the settings of the checkpoint; model.pretrained=FOLDER takes all of them from "
                "the folder."
            )
        raise UserError(f"{address} holds another model: model.{', model.'.join(differing)}. {advice}")


def set_aside(folder: str | Path, after: int = -1) -> str | None:
    """Move checkpoints later than step `after` to a new folder, so that a run that continues from that step
    does not overwrite them. Return the new folder, if any were moved."""
    later = [address for address in checkpoints(folder) if step_of(address) > after]
    if not later:
        return None
    where = storage(folder)
    beside = storage(parent(where.address))
    stem = where.address.rpartition("/")[2]
    taken = set(beside.names())
    names = (f"{stem}.old-{number}" for number in itertools.count(1))
    moved = beside.inside(next(name for name in names if name not in taken))
    moved.make()
    for address in later:
        where.move(address.rpartition("/")[2], moved)
    return moved.address


def prune(folder: str | Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints and those whose step is a multiple of `keep_every`, and
    the files of saves that never finished. It must not run during a save.
    """
    where, steps = storage(folder), [step_of(address) for address in checkpoints(folder)]
    retained = {*steps[-keep:], *(step for step in steps if keep_every and step % keep_every == 0)}
    for name in where.names():
        match = _STEP.fullmatch(name)
        if match and int(match[1]) in retained:
            _remove_leftovers(where.inside(name))
        elif match:
            where.inside(name).remove(MANIFEST)  # first, so that a half removed folder is no checkpoint
            where.remove(name)


def _remove_leftovers(where: Storage) -> None:
    """Remove files of saves of the same step that never finished, or that a later save replaced."""
    try:
        named = {MANIFEST, *_decode(_content(where), where).files}
    except UserError:
        return  # the manifest is damaged: its files may still help to repair it
    for name in where.names():
        if name not in named and (re.fullmatch(_FILE, name) or name.startswith(f".{MANIFEST}.")):
            where.remove(name)


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Inside this context, no other run can save into the folder. Only a local folder can be locked."""
    where = storage(folder)
    if "://" in where.address:
        yield
        return
    in_use = (
        f"{where.address}: another run is saving its checkpoints there now; give another checkpoint.folder"
    )
    try:
        where.make()
        lock = take_lock(Path(where.address, ".lock"), in_use)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {where.address} ({error.strerror}). Give another folder."
        ) from None
    with lock:
        yield
