"""`shardwise checkpoint list | check | diff | export | import`: work with the checkpoints of a run and with
Hugging Face folders.

A run folder or a folder of checkpoints means its newest checkpoint; for `list` and `check`, all of its
checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from shardwise.cli.arguments import AsJson
from shardwise.errors import UserError
from shardwise.library.torch_version import need_torch
from shardwise.plurals import counted

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.checkpoint import Manifest
    from shardwise.checkpoint.compare import Comparison
    from shardwise.config import Model
    from shardwise.files import Json

checkpoint = typer.Typer(
    no_args_is_help=True, help="List, check and compare checkpoints; to and from Hugging Face folders."
)
SHOWN = 12
"""Number of lines of one kind that are shown; the rest is counted. `--json` shows all."""
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "max_positions")

Checkpoint = Annotated[
    str, typer.Argument(help="A step-N folder, or a run folder for its newest; addresses such as s3://… too.")
]
Many = Annotated[str, typer.Argument(help="A run folder, a folder of checkpoints, or one step-N folder.")]


@checkpoint.command("list")
def list_(folder: Many, json: AsJson = False) -> None:
    """List the checkpoints of a run: step, time, size, layout, and whether all files are there. Reads
    manifests only."""
    rows = [_row(address) for address in _checkpoints_of(folder)]
    if json:
        _print_json({"checkpoints": rows})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("step", "saved", "size", "layout", "state", "folder", box=None, pad_edge=False)
    for row in rows:
        saved = (row["saved"] or "").replace("T", " ")
        state = row["problem"] or "whole"
        cells = (str(row["step"]), saved, _size(row["bytes"]), row["layout"], state, row["path"])
        table.add_row(*map(Text, cells))  # Text, because rich reads brackets in a str as a style
    console = Console(highlight=False)
    console.print(table) if console.is_terminal else _print_plain(table)


@checkpoint.command()
def check(folder: Many, json: AsJson = False) -> None:
    """Read every byte and compare it with what was saved. A damaged file is named, with status 1."""
    need_torch()
    rows = []
    for address in _checkpoints_of(folder):
        problems = list(_faults(address))
        rows.append({"path": address, "whole": not problems, "problems": problems})
        if not json:
            print(f"{address}: {'damaged' if problems else 'whole'}")
            print("".join(f"  {problem}\n" for problem in problems), end="")
    whole = all(row["whole"] for row in rows)
    if json:
        _print_json({"whole": whole, "checkpoints": rows})
    raise typer.Exit(0 if whole else 1)


@checkpoint.command()
def diff(first: Checkpoint, second: Checkpoint, json: AsJson = False) -> None:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them. Status 1 if any bit of a tensor
    differs."""
    need_torch()
    addresses = [newest(address) for address in (first, second)]  # refused before torch is imported
    from shardwise.checkpoint.compare import compare
    from shardwise.checkpoint.tensor_files import Contents

    with _bar("comparing", in_bytes=False) as progress:
        left, right = (Contents.open(address) for address in addresses)
        comparison = compare(left, right, lambda done, total: progress(done, total, done, total))
    if json:
        _print_json({"first": left.address, "second": right.address, **comparison.to_json()})
    else:
        _show(comparison, left.address, right.address)
    raise typer.Exit(0 if comparison.equal else 1)


@checkpoint.command()
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; it must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64; left out: as it was trained.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Most bytes in a file, for example 500MB or 5GB.")] = "1GB",
    json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder: config.json, safetensors, tokenizer. Holds one
    tensor in memory."""
    need_torch()
    address, limit = _check_export(checkpoint, folder, dtype), parse_size(shard_size)
    from shardwise.checkpoint.huggingface import export_checkpoint

    with _bar("exporting") as progress:
        done = export_checkpoint(address, folder, dtype, limit, progress)
    if json:
        written = {
            "architecture": done.architecture,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "files": done.files,
            "kept": done.kept,
        }
        _print_json({"checkpoint": address, "folder": str(folder), **written, "note": done.note})
        return
    tensors, files = counted(done.tensors, "tensor"), counted(done.files, "file")
    print(f"{folder}: {done.architecture}, {tensors}, {_size(done.bytes)} in {files}, from {address}")
    if done.kept:
        files = counted(done.kept, "file")
        typer.echo(f"and {files} as in the folder that the model came from, byte for byte", err=True)
    if done.note:
        typer.echo(f"note: {done.note}", err=True)


def _check_export(checkpoint: str, folder: Path, dtype: str | None) -> str:
    """Return the checkpoint to export.

    What can be refused without torch is refused here, because importing torch takes seconds.
    """
    from shardwise.checkpoint.folder import read_manifest, saved_model
    from shardwise.checkpoint.pretrained import HEADER_DTYPES, check_empty
    from shardwise.config.model_config import to_config

    if dtype is not None and dtype not in HEADER_DTYPES:
        raise UserError(f"--dtype {dtype}: not known; use one of {', '.join(HEADER_DTYPES)}")
    check_empty(folder)
    address = newest(checkpoint)
    model = saved_model(read_manifest(address), address)
    if model.module is not None:
        to_config(model)  # refuses it
    return address


@checkpoint.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with safetensors.")],
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint to write: a new folder.")],
    json: AsJson = False,
) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint that a job can start from, and print the
    job's [model]."""
    need_torch()
    from shardwise.checkpoint.pretrained import import_folder
    from shardwise.command_name import command_name
    from shardwise.library.machine import note_links

    note_links(folder)
    with _bar("importing") as progress:
        imported = import_folder(folder, checkpoint, progress)
    tables: dict[str, Json] = {"model": _set_fields(imported.model)}
    if imported.tokenizer is not None:
        tables["data"] = {"tokenizer": str(imported.tokenizer)}
    if json:
        _print_json(
            {"checkpoint": checkpoint, "tensors": imported.tensors, "bytes": imported.bytes, "job": tables}
        )
        return
    typer.echo(
        f"{checkpoint}: {counted(imported.tensors, 'tensor')}, {_size(imported.bytes)}; the job says",
        err=True,
    )
    print("\n\n".join(_table(name, values) for name, values in tables.items()))
    typer.echo(f"and `{command_name()} train JOB checkpoint.resume={checkpoint}` starts from it", err=True)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB, 1GiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    amount = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0
    if amount < 1:
        raise UserError(f"--shard-size {text}: not a size; write for example 500MB or 5GB")
    return int(amount)


def _checkpoints_of(folder: str) -> list[str]:
    """Return the checkpoints of a run folder or of a folder of checkpoints, oldest first; a checkpoint itself
    is returned alone."""
    from shardwise.checkpoint.folder import MANIFEST, checkpoints
    from shardwise.checkpoint.storage import storage

    where = storage(folder)
    if where.size(MANIFEST) is not None:
        return [where.address]
    names = where.names()
    if not names:
        raise UserError(f"{folder}: no such folder, or nothing in it; give a run folder or a step-N folder")
    inside = _run_checkpoints(Path(folder) / "config.toml") if "config.toml" in names else None
    for folder_of_steps in (inside, where.inside("checkpoints").address, where.address):
        if folder_of_steps and (addresses := checkpoints(folder_of_steps)):
            return addresses
    raise UserError(f"{folder} holds no checkpoint; a checkpoint is a folder step-N with a {MANIFEST}")


def kept_steps(run: Path) -> list[int] | None:
    """Return the steps of a run's checkpoints, wherever its job saves them; None if that cannot be read."""
    from shardwise.checkpoint import checkpoints, step_of

    try:
        return [
            step_of(address)
            for address in checkpoints(_run_checkpoints(run / "config.toml") or run / "checkpoints")
        ]
    except UserError:
        return None


def _run_checkpoints(config: Path) -> str | None:
    """Return the folder of checkpoints that the job of a run folder names, if it names one."""
    from shardwise.files import parse_toml, read_bytes

    try:
        table = parse_toml(read_bytes(config), config).get("checkpoint")
    except (OSError, UserError):
        return None
    folder = table.get("folder") if isinstance(table, dict) else None
    return folder if isinstance(folder, str) else None


def _faults(address: str) -> Iterator[str]:
    """Yield a sentence for each file that differs from what was saved."""
    from shardwise.checkpoint.tensor_files import faults

    with _bar("checking", "files") as progress:
        yield from faults(address, progress)


def newest(folder: str) -> str:
    """Return the newest checkpoint of a run folder or of a folder of checkpoints; a checkpoint is returned as
    it is."""
    return _checkpoints_of(folder)[-1]


class _Row(TypedDict):
    """What `list` shows of a checkpoint."""

    path: str
    step: int | None
    saved: str | None
    bytes: int | None
    layout: str
    world: int | None
    whole: bool
    problem: str | None


def _row(address: str) -> _Row:
    """Return what `list` shows of a checkpoint, read from its manifest."""
    from datetime import datetime

    from shardwise.checkpoint import read_manifest
    from shardwise.checkpoint.folder import MANIFEST

    path = Path(address) / MANIFEST
    time = None
    if path.is_file():
        time = datetime.fromtimestamp(path.stat().st_mtime).isoformat(timespec="seconds")
    name = re.search(r"step-(\d+)$", address)
    try:
        manifest = read_manifest(address)
    except UserError as error:
        return {
            "path": address,
            "step": int(name[1]) if name else None,
            "saved": time,
            "bytes": None,
            "layout": "",
            "world": None,
            "whole": False,
            "problem": str(error).partition(". Remove")[0],
        }
    return {
        "path": address,
        "step": manifest.step,
        "saved": time,
        "bytes": manifest.total_bytes,
        "layout": _layout(manifest),
        "world": manifest.world,
        "whole": True,
        "problem": None,
    }


def _layout(manifest: Manifest) -> str:
    """Return the degrees and the sharding of a layout in words. A checkpoint from an import has no layout."""
    from shardwise.plans.grid import describe_degrees

    layout = manifest.layout
    return f"{describe_degrees(layout)}, zero {layout.get('zero')}" if layout else "weights alone"


def _show(comparison: Comparison, first: str, second: str) -> None:
    lines = [f"{key}: {left!r} and {right!r}" for key, (left, right) in comparison.facts.items()]
    _print_list("the manifests differ in", lines)
    _print_list("not compared:", [f"{kind}.*: {why}" for kind, why in comparison.left_out.items()])
    _print_list(f"only in {first}:", comparison.only_first)
    _print_list(f"only in {second}:", comparison.only_second)
    differences = [
        f"{gap.tensor}: {gap.reason}"
        + ("" if gap.max_abs is None else f" differ, by {gap.max_abs:.3g} at most")
        for gap in comparison.differences
    ]
    _print_list("tensors that differ, weights first:", differences)
    if comparison.equal:
        print(f"equal to the bit: {counted(comparison.compared, 'tensor')}")
    else:
        print(f"different: {len(differences)} of the {counted(comparison.compared, 'tensor')} that both have")


def _print_list(title: str, lines: list[str]) -> None:
    """Print the first lines under a title, and how many more there are. Print nothing if there are none."""
    rest = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    if lines:
        print("\n  ".join([title, *lines[:SHOWN], *rest]))


def _set_fields(model: Model) -> Json:
    """Return the settings that a job needs for this model: its shape, and whatever differs from the
    default."""
    fields, values = type(model).model_fields, model.settings()
    return {key: value for key, value in values.items() if key in SHAPE or value != fields[key].default}


def _table(name: str, values: Mapping[str, object]) -> str:
    from json import dumps  # numbers, truth values and strings are the same in TOML

    lines = [f"{key} = {dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines])


def _size(bytes: int | None) -> str:
    from shardwise.observe.format import format_bytes

    return "" if bytes is None else format_bytes(bytes)


def _print_json(content: Json) -> None:
    from shardwise.observe.records import to_json

    print(to_json(content))


def _print_plain(table: Table) -> None:
    """Print a table without breaking lines, for a file or a pipe."""
    from rich.console import Console

    Console(highlight=False, width=400).print(table)


@contextmanager
def _bar(
    title: str, unit: str = "tensors", in_bytes: bool = True
) -> Iterator[Callable[[int, int, int, int], None]]:
    """Show a progress bar on standard error, on a terminal only, and yield the function that updates it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bytes_ = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn(f"{title} {{task.fields[counted]}}"), BarColumn(), *bytes_, TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(title, total=None, counted="")

    def show(count: int, of: int, done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, counted=f"{count}/{of} {unit}")

    try:
        yield show
    finally:
        bar.stop()
