"""Write a checkpoint's weights as a Hugging Face folder, one tensor at a time. checkpoint/pretrained.py reads
such a folder.

It contains config.json, weights in safetensors files, an index that says which file holds which tensor if
there are several, and the tokenizer. The model is never whole in memory: names, shapes and so all offsets
follow from the configuration (config/families.py), so a file's header is written first and the tensors after
it as they are read. The safetensors library needs all tensors of a file at once, so it does not write the
files; the format is a length, a JSON header and raw bytes.

If the model came from such a folder, the files that training does not change are written byte for byte
(huggingface_files.py): all files but the weights, config.json too unless the dtype has changed.

It needs memory for the largest tensor and its converted copy; for experts, for those of one layer
(benchmarks/export_memory.py). Its time is that of the disk, which is read twice: first to check that the
checkpoint is undamaged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwise.checkpoint.conversions import to_theirs
from shardwise.checkpoint.folder import Table, saved_model
from shardwise.checkpoint.huggingface_files import as_files, files_of_checkpoint
from shardwise.checkpoint.pretrained import (
    HEADER_DTYPES,
    INDEX,
    WEIGHTS,
    Progress,
    check_empty,
    join_names,
    no_progress,
)
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config.dtype_names import BYTES as DTYPE_BYTES
from shardwise.config.families import Family
from shardwise.config.family_tensors import TensorMatch, tensor_matches, their_shapes
from shardwise.config.model import Model
from shardwise.config.model_config import to_config, to_model
from shardwise.config.parameters import parameter_shapes
from shardwise.config.pretrained_folder import CONFIG, TOKENIZER, TOKENIZER_CONFIG, TRAINING_KEYS
from shardwise.data import load_tokenizer
from shardwise.data.prepare import tokenizer_of_run
from shardwise.data.tokenizer import BYTES, HuggingFaceTokenizer
from shardwise.errors import UserError
from shardwise.files import parse_as


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    architecture: str
    tensors: int
    bytes: int
    files: int
    note: str | None
    """What the folder lacks, as a sentence for the user."""
    kept: int
    """Number of files that are copies of those in the folder that the model came from."""


@dataclass(frozen=True)
class ExportSource:
    """A model to be written: its configuration, and its tensors by our names."""

    model: Model
    dtypes: Mapping[str, str]
    read: Callable[[str], Tensor]
    tokenizer: str | None
    end_of_document: str | int | None
    kept: Mapping[str, bytes]
    """The other files of the folder that it came from, by name."""


def export_checkpoint(
    checkpoint: str,
    folder: Path,
    dtype: str | None = None,
    shard_bytes: int = 1 << 30,
    progress: Progress = no_progress,
) -> Exported:
    """Write the weights of a checkpoint as a folder that `from_pretrained` opens. If `dtype` is None, each
    tensor keeps its dtype."""
    contents = Contents.open(checkpoint)
    model = saved_model(contents.manifest, contents.address)
    kept = as_files(files_of_checkpoint(contents))
    _family_and_config(model, kept)  # so that a model is refused before every byte is read
    _check_shapes(contents, model)
    contents.check()
    dtypes = {key.name: stored.dtype for key, stored in contents.tensors.items() if key.is_model}
    tokenizer, end = tokenizer_of_run(contents.manifest.data)
    source = ExportSource(
        model, dtypes, lambda name: contents.read(StateKey.model(name)), tokenizer, end, kept
    )
    return write_folder(source, folder, dtype, shard_bytes, progress)


def _check_shapes(contents: Contents, model: Model) -> None:
    for name, shape in parameter_shapes(model).items():
        stored = contents.tensors.get(StateKey.model(name))
        if stored is not None and stored.shape != shape:
            raise UserError(
                f"{contents.address}: {name} is {stored.shape}, but {shape} in the model that it says "
                "it holds"
            )


def write_folder(
    source: ExportSource, folder: Path, dtype: str | None, shard_bytes: int, progress: Progress = no_progress
) -> Exported:
    """Write a Hugging Face folder of a model. The folder gets its name once it is complete."""
    check_empty(folder)
    family, config = _family_and_config(source.model, source.kept)
    plan = tensor_matches(family.tensors, source.model)
    entries = _entries(source, plan, dtype)
    with _aside(folder) as aside:
        files = _write_weights(aside, entries, _converted(source, plan, entries), shard_bytes, progress)
        kept = _write_kept(aside, source.kept, config, dtype or _commonest(entries))
        note = None
        if TOKENIZER not in kept:
            end, note = _write_tokenizer(aside, source)
            config = {"bos_token_id": None, "eos_token_id": end, "use_cache": True} | config
        if CONFIG not in kept:
            _write_json(aside / CONFIG, _with_dtype(config, dtype or _commonest(entries)))
    total = sum(entry.bytes for entry in entries)
    return Exported(folder, family.architecture, len(entries), total, files, note, len(kept))


def _family_and_config(model: Model, kept: Mapping[str, bytes]) -> tuple[Family, Table]:
    """Return the family and config.json of a model: those of the folder that it came from, if they describe
    the model."""
    if CONFIG in kept:
        config = parse_as(Table, kept[CONFIG], f"the {CONFIG} that the checkpoint keeps")
        family, described = to_model(config, CONFIG)
        settings = {key: value for key, value in described.settings().items() if key not in TRAINING_KEYS}
        if all(getattr(model, key) == value for key, value in settings.items()):
            return family, config
    return to_config(model)


def _with_dtype(config: Table, dtype: str) -> Table:
    """Return a configuration with this dtype, under whichever of its two names the configuration uses."""
    return {**config, ("dtype" if "dtype" in config else "torch_dtype"): dtype}


def _write_kept(folder: Path, kept: Mapping[str, bytes], config: Table, dtype: str) -> set[str]:
    """Write the files that training did not change, config.json too unless the dtype has changed. Return
    their names."""
    same = {name: content for name, content in kept.items() if name != CONFIG}
    if CONFIG in kept and config == _with_dtype(config, dtype) == json.loads(kept[CONFIG]):
        same[CONFIG] = kept[CONFIG]
    for name, content in same.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as stream:
            stream.write(content)
            _sync(stream)
    return set(same)


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end, or removed after an error."""
    aside = folder.absolute().parent / f".{folder.absolute().name}.writing"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        aside.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} could not be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _entries(source: ExportSource, plan: list[TensorMatch], dtype: str | None) -> list[TensorEntry]:
    ours, entries = parameter_shapes(source.model), []
    if absent := [name for name in ours if name not in source.dtypes]:
        raise UserError(f"the checkpoint lacks {join_names(absent)} of the model that it says it holds")
    for match in plan:
        stored_as = dtype or source.dtypes[match.ours[0]]
        entries += [TensorEntry(name, shape, stored_as) for name, shape in their_shapes(match, ours).items()]
    if unknown := {entry.dtype for entry in entries} - HEADER_DTYPES.keys():
        raise UserError(
            f"dtype {', '.join(sorted(unknown))}: not known here; use one of {', '.join(HEADER_DTYPES)}"
        )
    return entries


def _commonest(entries: list[TensorEntry]) -> str:
    """Return the dtype of most bytes."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _converted(source: ExportSource, plan: list[TensorMatch], entries: list[TensorEntry]) -> Iterator[Tensor]:
    """Yield the tensors of the entries in order."""
    remaining = iter(entries)
    for match in plan:
        for tensor in to_theirs(match, [source.read(name) for name in match.ours]):
            entry = next(remaining)
            assert tuple(tensor.shape) == entry.shape, entry.name
            yield tensor.to(getattr(torch, entry.dtype))


def _write_weights(
    folder: Path, entries: list[TensorEntry], tensors: Iterator[Tensor], shard_bytes: int, progress: Progress
) -> int:
    shards = _shards(entries, shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [WEIGHTS] if len(shards) == 1 else names
    total, done, count = sum(entry.bytes for entry in entries), 0, 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as stream:
            stream.write(_header(shard))
            for entry in shard:
                stream.write(_raw(next(tensors)))
                done, count = done + entry.bytes, count + 1
                progress(count, len(entries), done, total)
            _sync(stream)
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(shards)


def _shards(entries: list[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    """Return the entries of each file, in order; a tensor larger than the limit has a file for itself."""
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.bytes
    return shards


def _header(entries: list[TensorEntry]) -> bytes:
    """Return a header: the length of the JSON and the JSON, padded so that tensors begin at a multiple of
    8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        dtype, offsets = HEADER_DTYPES[entry.dtype], [begin, begin := begin + entry.bytes]
        table[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        _sync(stream)


def _sync(stream: IO[Any]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _write_tokenizer(folder: Path, source: ExportSource) -> tuple[int | None, str | None]:
    """Write the run's tokenizer.json and the settings with which transformers opens it. Return the id that
    ends a text, and a note on what is missing."""
    if source.tokenizer is None:
        return None, "the checkpoint names no tokenizer, so the folder has none"
    if source.tokenizer == BYTES:
        note = "tokens are bytes, for which Hugging Face has no tokenizer file, so the folder has none"
        return load_tokenizer(BYTES).end, note
    try:
        tokenizer = load_tokenizer(source.tokenizer, source.end_of_document)
    except UserError as error:
        return None, f"{error} The folder has no tokenizer."
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    tokenizer.save(folder)
    if TOKENIZER_CONFIG in source.kept:
        return tokenizer.end, None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([tokenizer.end]),
        "model_max_length": source.model.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if (template := tokenizer.find_template()) is not None:
        settings |= {**template.tokens, "chat_template": template.source}
    _write_json(folder / TOKENIZER_CONFIG, settings)
    return tokenizer.end, None
