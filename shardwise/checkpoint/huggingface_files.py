"""The files of a Hugging Face folder that training does not change, kept byte for byte from import to export.

A model is more than its weights: the tokenizer's files, the chat template, generation_config.json, the
special ids in config.json, the licence. They travel inside of checkpoints as tensors of bytes with keys of
the kind FILE, beside the weights. So whatever a checkpoint is put through (other layouts, other storage,
another machine, the folder gone), they are put through too, checksums included. The main rank holds them in
memory and writes them with each save: a few MB, 35 for the largest tokenizers.

Kept is every file of the folder but weights, and of its subfolders the one that the transformers library
keeps chat templates in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config.pretrained_folder import TOKENIZER, file_of
from shardwise.data.tokenizer import file_fingerprint
from shardwise.errors import UserError, shown
from shardwise.files import read_bytes, reading

LARGEST = 256 << 20
"""Bytes of a file that is kept; what is larger holds weights, whatever it is called."""
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|ot|ckpt)(\.index\.json)?")
_OF_TOKENIZERS = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece")
_NAME = re.compile(r"(additional_chat_templates/)?[^/\0.][^/\0]{0,200}")


def kept_key(name: str) -> StateKey:
    """Return the key under which a checkpoint holds the file of this name."""
    return StateKey(StateKind.FILE, name)


def kept_of_folder(folder: Path) -> dict[StateKey, Tensor]:
    """Return the kept files of a Hugging Face folder, as a checkpoint holds them."""
    kept = {}
    for name, path in _files(folder):
        if path.stat().st_size <= LARGEST:
            content = np.frombuffer(bytearray(read_bytes(path)), dtype=np.uint8)
            kept[kept_key(name)] = torch.from_numpy(content)
    return kept


def kept_of_checkpoint(contents: Contents) -> dict[StateKey, Tensor]:
    """Return the kept files in a checkpoint, as they are."""
    return {key: contents.read(key) for key in contents.tensors if key.kind is StateKind.FILE}


def as_files(kept: Mapping[StateKey, Tensor]) -> dict[str, bytes]:
    """Return the content of the files by name; refuse a name that leads out of a folder, or is that of
    weights."""
    files = {key.name: bytes(tensor.numpy()) for key, tensor in kept.items()}
    for name in files:
        if not _NAME.fullmatch(name) or _WEIGHTS.fullmatch(name):
            raise UserError(f"the checkpoint keeps a file {shown(name)}, which no Hugging Face folder has")
    return files


def has_tokenizer(kept: Mapping[StateKey, Tensor], fingerprint: str) -> bool:
    """Whether no other tokenizer is among them than that of data with this fingerprint. One without a
    tokenizer.json, a vocab.json say, cannot be compared, and counts as another."""
    if (tokenizer := kept.get(kept_key(TOKENIZER))) is not None:
        return file_fingerprint(bytes(tokenizer.numpy())) == fingerprint
    return not any(_OF_TOKENIZERS.match(key.name) for key in kept)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    with reading(folder):
        for subfolder in ("", "additional_chat_templates"):
            inside = folder / subfolder
            for path in (
                sorted(inside.iterdir())
                if inside.is_dir() and not (subfolder and inside.is_symlink())
                else ()
            ):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and _NAME.fullmatch(name) and not _WEIGHTS.fullmatch(name):
                    yield name, file_of(folder, path.name, subfolder)
