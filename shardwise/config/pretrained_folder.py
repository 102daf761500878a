"""`model.pretrained`: the settings that a Hugging Face folder gives to a job. Nothing here imports torch.

The folder's config.json fills `[model]` (model_config.py), its tokenizer.json is `data.tokenizer`, and the
end token of its tokenizer is `data.end_of_document`. Other settings of the job must agree with the folder: a
model of another shape cannot load the weights, and other token ids or another epsilon would silently make
them worse. A job may choose the token that ends documents, and the losses of routers, which only training
has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardwise.config.check import sources_of_model
from shardwise.config.families import Family
from shardwise.config.model import Model
from shardwise.config.model_config import to_model
from shardwise.errors import UserError, shown
from shardwise.files import Json, file_or_link_in_folder, is_link_outside, parse_as, read_bytes, reading
from shardwise.plurals import counted

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
TRAINING_KEYS = ("balance_loss", "router_z_loss")
"""Keys of `[model]` that matter in training only."""

Tables = dict[str, Json]
"""The tables of a job by name, before they are validated."""


def with_pretrained(tables: Tables, problems: list[str]) -> Tables:
    """Return the tables of a job, filled from the folder of `model.pretrained` if there is one.

    A job that also names a preset or a module is refused (config/check.py), and its [model] stays unchanged.
    The folder's tokenizer is filled in all the same, so that no false problem is reported about the data.
    """
    model, data = tables.get("model", {}), tables.get("data", {})
    pretrained = model.get("pretrained")
    if not isinstance(pretrained, str) or not pretrained:
        return tables
    folder = Path(pretrained)
    alone = len(sources_of_model(model)) == 1
    try:
        described = read_model(folder)[1].settings() if alone else {}
        problems += [*_disagreements(model, described, folder), *_other_tokenizer(data, folder)]
    except UserError as error:
        problems.append(f"model.pretrained: {error}")
        return tables
    return {**tables, "model": {**described, **model}, "data": {**_data_settings(folder), **data}}


def read_model(folder: Path) -> tuple[Family, Model]:
    """Return the family and the model of a folder's config.json."""
    path = file_of(folder, CONFIG)
    with reading(path):
        if not path.is_file():
            download = ". A name on the hub is downloaded first: `hf download NAME --local-dir FOLDER`"
            hint = "" if folder.is_dir() else download
            raise UserError(f"{folder} is not a Hugging Face folder: it has no {CONFIG}{hint}")
    return to_model(parse_as(Json, read_bytes(path), path), str(path))


def file_of(folder: Path, name: str, subfolder: str = "") -> Path:
    """Return the path of a file of the folder. It may be a link, as on shared storage and in the hub's
    cache."""
    return file_or_link_in_folder(folder / subfolder, name)


def links_outside(folder: Path) -> str | None:
    """Return a message about the files of a folder that are links to files elsewhere; None if there are none.

    Links of a snapshot in the hub's cache to the blobs of its model are not counted.
    """
    real = Path(os.path.realpath(folder))  # the folder itself may be reached by a link into the cache
    root = real.parents[1] if real.parent.name == "snapshots" else real
    with reading(folder):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        outside = [path for path in files if path.is_file() and is_link_outside(path, root)]
    if not outside:
        return None
    first = outside[0]
    are_links = "is a link to a file" if len(outside) == 1 else "are links to files"
    return (
        f"{folder}: {counted(len(outside), 'file')} {are_links} elsewhere ({first.name}: "
        f"{os.path.realpath(first)})"
    )


def _disagreements(model: Json, described: Json, folder: Path) -> Iterator[str]:
    """Yield the settings of the job's model that differ from the folder's config.json."""
    for key, value in model.items():
        if key in described and key not in TRAINING_KEYS and value != described[key]:
            yield (
                f"model.{key} = {shown(value)}: {folder / CONFIG} says {shown(described[key])}; leave it "
                "out, or leave out model.pretrained"
            )


def _other_tokenizer(data: Json, folder: Path) -> Iterator[str]:
    """Refuse a tokenizer whose file differs from the folder's."""
    given, expected = data.get("tokenizer"), file_of(folder, TOKENIZER)
    if not isinstance(given, str) or not expected.is_file():
        return
    path = Path(given) / TOKENIZER if Path(given).is_dir() else Path(given)
    if not path.is_file() or (path != expected and read_bytes(path) != read_bytes(expected)):
        yield (
            f"data.tokenizer = {shown(given)}: not that of model.pretrained, {expected}, whose ids the model "
            "knows; leave it out"
        )


def tokenizer_settings(folder: Path) -> Json:
    """Return the content of a folder's tokenizer_config.json; empty if there is none that can be read."""
    # These files often have a number of 100 bits, which parse_json refuses.
    with suppress(UserError, OSError, ValueError, RecursionError):
        settings = json.loads(read_bytes(file_of(folder, TOKENIZER_CONFIG)))
        return settings if isinstance(settings, dict) else {}
    return {}


def _data_settings(folder: Path) -> Json:
    """Return the keys of [data] that a folder's tokenizer decides."""
    if not file_of(folder, TOKENIZER).is_file():
        return {}
    settings: Json = {"tokenizer": str(folder / TOKENIZER)}
    end = tokenizer_settings(folder).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return settings | ({"end_of_document": end} if isinstance(end, str) and end else {})
