"""Checkpoints in a folder: what counts as one, which is newest, and what it says of itself. No torch.

A checkpoint is a folder `step-N` that holds

    checkpoint.json        the manifest: the step, the model, the layout that wrote the checkpoint, and the
                           size and checksum of every file
    tensors-ID.json        where each tensor's pieces lie (checkpoint/tensor_files.py)
    rank-R-ID.data         what rank R wrote: raw tensors, one after the other

The manifest is put in place last, whole or not at all, and a folder without one is no checkpoint. ID is drawn
anew for every save, so that saving a step again touches no file of the checkpoint that is there, and a writer
left over from workers that are long gone writes files that no manifest will ever name. A crash at any byte
thus leaves the old checkpoint or the new one.

One flipped bit anywhere is noticed: the manifest holds a CRC-32 of every file, and is sealed by one of
itself. Nothing is ever unpickled, here or elsewhere in this room, so opening a checkpoint runs no code from
it; names in it that are not of the three kinds above are refused, which leaves no way out of the folder.
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
from shardwise.plan import SavedLayout

MANIFEST = "checkpoint.json"
FORMAT = 2

_STEP = re.compile(r"step-(\d{1,18})")
_FILE = r"^(tensors-[0-9a-z]{1,32}\.json|rank-[0-9]{1,9}-[0-9a-z]{1,32}\.data)$"


@with_config(ConfigDict(strict=True, extra="forbid"))
class WrittenFile(TypedDict):
    """Size and checksum of a file."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


@with_config(ConfigDict(strict=True, extra="allow"))
class _SavedData(TypedDict, total=False):
    """What of a job's [data] is read again."""

    tokenizer: str
    end_of_document: str | None


@with_config(ConfigDict(strict=True, extra="allow"))
class _SavedScale(TypedDict, total=False):
    """The loss scale of a run: both or, in a checkpoint of weights alone, none."""

    value: Annotated[float, Field(gt=0)]
    clean_steps: Annotated[int, Field(ge=0)]


def _both_or_none(scale: dict[str, Any]) -> dict[str, Any]:
    if scale and not {"value", "clean_steps"} <= scale.keys():
        raise ValueError("value and clean_steps belong together")
    return scale


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. What of its tables is used again has its type; the rest is only
    compared and shown."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0)]
    model: dict[str, Any]
    train: dict[str, Any]
    data: Annotated[dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(_SavedData))]
    layout: Annotated[dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(SavedLayout))]
    loss_scale: Annotated[
        dict[str, Any],
        GetPydanticSchema(lambda _, schema_of: schema_of(_SavedScale)),
        AfterValidator(_both_or_none),
    ]
    world: Annotated[int, Field(ge=1)]
    torch: str
    files: dict[Annotated[str, Field(pattern=_FILE)], WrittenFile]
    sequences: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    """How many the run had seen: where its data goes on."""
    missing: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...] = ()
    """Of those, (first, end) of what was still under way with a parameter server's workers, and is not in the
    weights."""
    groups: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """That train by themselves, each with a state of its own beside the model's; 0: all train together."""
    under_way: tuple[Annotated[str, Field(max_length=1024)], ...] = ()
    """Parameters that such groups were exchanging."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The [optimizer] table of the run; empty: it is from before there was one, or weights from elsewhere."""
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file["bytes"] for file in self.files.values())

    def encode(self) -> bytes:
        """As the file holds it."""
        return seal(asdict(self))

    def write(self, folder: str | Path) -> None:
        """As checkpoint.json in that folder: from now on it is a checkpoint."""
        storage(folder).put(MANIFEST, self.encode())


def held_model(manifest: Manifest, address: str) -> Model:
    """The model that a checkpoint says it holds."""
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
    """The manifest of a checkpoint, with its files' sizes compared against the storage."""
    where = storage(folder)
    manifest = _decode(_content(where), where)
    if ".metadata" in where.names():
        raise UserError(
            f"{where.address}/.metadata is a pickle, which may run code: it is no part of a checkpoint. "
            f"Remove it."
        )
    for name, file in manifest.files.items():
        size = where.size(name)
        if size != file["bytes"]:
            state = "is missing" if size is None else f"has {size} bytes instead of {file['bytes']}"
            raise UserError(f"{where.address}/{name} {state}. {_advice(where)}")
    return manifest


def _content(where: Storage) -> bytes:
    try:
        return where.read(MANIFEST)
    except FileNotFoundError:
        raise UserError(f"{where.address} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        kind = Unreadable if is_temporary(error) else UserError
        raise kind(f"{where.address}/{MANIFEST} cannot be read: {error}. {_advice(where)}") from None


def _advice(where: Storage) -> str:
    return f"Remove {where.address} to resume from an older checkpoint."


def _decode(content: bytes, where: Storage) -> Manifest:
    manifest = read_sealed(
        Manifest, content, f"{where.address}/{MANIFEST}", ("format", FORMAT), _advice(where)
    )
    if (
        manifest.step and not manifest.sequences
    ):  # from before they were counted: each step had taken the batch that is named
        batch = manifest.train.get("global_batch")
        return (
            replace(manifest, sequences=manifest.step * batch)
            if type(batch) is int and batch > 0
            else manifest
        )
    return manifest


@dataclass(frozen=True)
class Resume:
    """Which checkpoint a run starts from."""

    folder: str
    """The folder of the run's checkpoints."""
    wanted: str
    """`auto`: the newest in that folder, if any; `never`: none; or the path of a checkpoint."""
    model: Model
    """The model that the checkpoint must hold."""


def step_of(address: str) -> int:
    """The step of a checkpoint, by its name."""
    match = _STEP.fullmatch(address.rpartition("/")[2])
    assert match, f"{address} is no checkpoint's name"
    return int(match[1])


def checkpoints(folder: str | Path) -> list[str]:
    """The checkpoints in a folder, oldest first: those that were saved to the end, whether or not damaged
    since."""
    where = storage(folder)
    steps = [
        (int(match[1]), where.inside(name)) for name in where.names() if (match := _STEP.fullmatch(name))
    ]
    return [
        inside.address
        for _, inside in sorted(steps, key=lambda pair: pair[0])
        if inside.size(MANIFEST) is not None
    ]


def to_resume(resume: Resume) -> str | None:
    """Return the checkpoint that a run will start from, as far as manifests can tell, checked to belong to
    it; None for a fresh start.

    It reads no tensors, so that it can be asked before any worker starts. The workers then look at every byte
    (`Checkpointer.choose_checkpoint`), and may go back to an older one.
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
        raise none_is_whole(resume.folder, reasons)
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


def none_is_whole(folder: str, reasons: list[str]) -> UserError:
    """What to say where every checkpoint is damaged: to start afresh is the user's decision, not ours."""
    problems = "\n  ".join(reasons)
    return UserError(
        f"{folder} has checkpoints, but none that is whole:\n  {problems}\n"
        "Mend one, give another with checkpoint.resume=PATH, or start afresh with checkpoint.resume=never."
    )


def check_same_model(address: str, manifest: Manifest, model: Model) -> None:
    """Refuse the checkpoint of another model, with what differs."""
    wanted = model.settings()
    # A key that the checkpoint does not know came later, and its default is what was done before.
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
                "Give the job what the checkpoint has; model.pretrained=FOLDER takes it all from the folder "
                "itself."
            )
        raise UserError(f"{address} holds another model: model.{', model.'.join(differing)}. {advice}")


def set_aside(folder: str | Path, after: int = -1) -> str | None:
    """Move checkpoints later than step `after` out of the way of a run that goes on from there; none touches
    the other."""
    later = [address for address in checkpoints(folder) if step_of(address) > after]
    if not later:
        return None
    where = storage(folder)
    beside = storage(parent(where.address))
    stem = where.address.rpartition("/")[2]
    taken = set(beside.names())
    moved = beside.inside(
        next(name for number in itertools.count(1) if (name := f"{stem}.old-{number}") not in taken)
    )
    moved.make()
    for address in later:
        where.move(address.rpartition("/")[2], moved)
    return moved.address


def prune(folder: str | Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints and each whose step `keep_every` divides, and what saves
    that never finished left behind. Not while a save is being written.
    """
    where, whole = storage(folder), checkpoints(folder)
    kept = {step_of(address) for address in whole[-keep:]}
    kept |= {step for address in whole if keep_every and (step := step_of(address)) % keep_every == 0}
    for name in where.names():
        match = _STEP.fullmatch(name)
        if match and int(match[1]) in kept:
            _remove_leftovers(where.inside(name))
        elif match:
            where.inside(name).remove(MANIFEST)  # first, so that a half removed checkpoint is none
            where.remove(name)


def _remove_leftovers(where: Storage) -> None:
    """Files of saves of the same step that never finished, or that a later one replaced."""
    try:
        named = {MANIFEST, *_decode(_content(where), where).files}
    except UserError:
        return  # a damaged manifest: what is here may still help somebody to mend it
    for name in where.names():
        if name not in named and (re.fullmatch(_FILE, name) or name.startswith(f".{MANIFEST}.")):
            where.remove(name)


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Keep any other run from saving into a folder while this one lasts. Only a local folder can be held."""
    where = storage(folder)
    if "://" in where.address:
        yield
        return
    in_use = (
        f"{where.address}: another run is saving its checkpoints there now; give another checkpoint.folder"
    )
    try:
        where.make()
        lock = take_lock(Path(where.address), in_use)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {where.address} ({error.strerror}). Give another folder."
        ) from None
    with lock:
        yield
