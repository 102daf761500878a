"""`model.pretrained`: what a Hugging Face folder says of its model, laid under what the job says. No torch.

The folder's config.json fills `[model]` (model_config.py), its tokenizer.json is `data.tokenizer`, and the
token that its tokenizer ends a text with is `data.end_of_document`. What the job says besides must agree: a
model of another shape could not take the weights, and other ids or another epsilon would spoil what they know
without a word. The token that ends documents is the job's to choose, and so are the losses of routers, which
only training has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.config.check import sources_of_model
from shardwise.config.families import Family
from shardwise.config.model import Model
from shardwise.config.model_config import to_model
from shardwise.errors import UserError, shown
from shardwise.files import file_or_link_in_folder, is_link_outside, parse_as, read_bytes, reading
from shardwise.plurals import counted

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
OF_TRAINING = ("balance_loss", "router_z_loss")
"""Keys of `[model]` that only say how it is trained."""

Tables = dict[str, dict[str, Any]]


def with_pretrained(tables: Tables, problems: list[str]) -> Tables:
    """The tables of a job, filled from the folder that its model comes from, if it names one.

    Where the job also gives a preset or a module, it is refused (config/check.py) and [model] is left as it
    is. The folder's tokenizer is still filled in, so that nothing is said against a folder that is
    complete.
    """
    model, data = tables.get("model", {}), tables.get("data", {})
    if not isinstance(model.get("pretrained"), str) or not model["pretrained"]:
        return tables
    folder = Path(model["pretrained"])
    alone = len(sources_of_model(model)) == 1
    try:
        described = read_model(folder)[1].settings() if alone else {}
        problems += [*_disagreements(model, described, folder), *_other_tokenizer(data, folder)]
    except UserError as error:
        problems.append(f"model.pretrained: {error}")
        return tables
    return {**tables, "model": {**described, **model}, "data": {**_data_of(folder), **data}}


def read_model(folder: Path) -> tuple[Family, Model]:
    """The family and our model of a folder's config.json."""
    path = file_of(folder, CONFIG)
    with reading(path):
        if not path.is_file():
            hint = (
                ""
                if folder.is_dir()
                else ". A name on the hub is downloaded first: `hf download NAME --local-dir FOLDER`"
            )
            raise UserError(f"{folder} is not a Hugging Face folder: it has no {CONFIG}{hint}")
    return to_model(parse_as(dict[str, Any], read_bytes(path), path), str(path))


def file_of(folder: Path, name: str, subfolder: str = "") -> Path:
    """A file of the folder, which may be a link: on shared storage and in the hub's cache they usually
    are."""
    return file_or_link_in_folder(folder / subfolder, name)


def links_outside(folder: Path) -> str | None:
    """A sentence about the files of a folder that are links to files elsewhere; None where there are none.

    In the hub's cache, snapshots have links to the blobs of all versions of a model, which belong to it.
    """
    real = Path(os.path.realpath(folder))  # the folder itself may be reached by a link into the cache
    root = real.parents[1] if real.parent.name == "snapshots" else real
    with reading(folder):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        outside = [path for path in files if path.is_file() and is_link_outside(path, root)]
    if not outside:
        return None
    first, are = outside[0], "is a link" if len(outside) == 1 else "are links"
    return (
        f"{folder}: {counted(len(outside), 'file')} {are} to files elsewhere ({first.name}: "
        f"{os.path.realpath(first)})"
    )


def _disagreements(model: dict[str, Any], described: dict[str, Any], folder: Path) -> Iterator[str]:
    for key, value in model.items():
        if key in described and key not in OF_TRAINING and value != described[key]:
            yield (
                f"model.{key} = {shown(value)}: {folder / CONFIG} says {shown(described[key])}; leave it "
                f"out, or leave out "
                "model.pretrained"
            )


def _other_tokenizer(data: dict[str, Any], folder: Path) -> Iterator[str]:
    """A tokenizer other than the folder's, byte for byte."""
    given, own = data.get("tokenizer"), file_of(folder, TOKENIZER)
    if not isinstance(given, str) or not own.is_file():
        return
    path = Path(given) / TOKENIZER if Path(given).is_dir() else Path(given)
    if not path.is_file() or (path != own and read_bytes(path) != read_bytes(own)):
        yield (
            f"data.tokenizer = {shown(given)}: not that of model.pretrained, {own}, whose ids the model "
            f"knows; leave it out"
        )


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What a folder's tokenizer_config.json says; nothing where there is none that can be read."""
    # Usual files have a number of 100 bits, which our own reader refuses.
    with suppress(UserError, OSError, ValueError, RecursionError):
        settings = json.loads(read_bytes(file_of(folder, TOKENIZER_CONFIG)))
        return settings if isinstance(settings, dict) else {}
    return {}


def _data_of(folder: Path) -> dict[str, Any]:
    if not file_of(folder, TOKENIZER).is_file():
        return {}
    found: dict[str, Any] = {"tokenizer": str(folder / TOKENIZER)}
    end = tokenizer_settings(folder).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return found | ({"end_of_document": end} if isinstance(end, str) and end else {})
