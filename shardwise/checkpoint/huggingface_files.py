"""Files of a Hugging Face folder that training does not change, preserved byte for byte from import to
export.

A model is more than its weights: the tokenizer's files, the chat template, generation_config.json, the
special ids in config.json, the licence. Checkpoints hold them as tensors of bytes with keys of the kind FILE,
beside the weights. So they stay with the weights through other layouts, other storage and other machines, and
have checksums. The main rank holds them in memory and writes them with each save: a few MB, 35 for the
largest tokenizers.

These are all files of the folder but weights, and those of the subfolder in which the transformers library
puts chat templates.
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
"""Size in bytes of the largest file that is preserved; a larger file holds weights, whatever its name."""
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|ot|ckpt)(\.index\.json)?")
_OF_TOKENIZERS = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece")
_NAME = re.compile(r"(additional_chat_templates/)?[^/\0.][^/\0]{0,200}")


def file_key(name: str) -> StateKey:
    """Return the key under which a checkpoint holds the file of this name."""
    return StateKey(StateKind.FILE, name)


def files_of_folder(folder: Path) -> dict[StateKey, Tensor]:
    """Return the files of a Hugging Face folder as tensors for a checkpoint."""
    tensors = {}
    for name, path in _files(folder):
        if path.stat().st_size <= LARGEST:
            content = np.frombuffer(bytearray(read_bytes(path)), dtype=np.uint8)
            tensors[file_key(name)] = torch.from_numpy(content)
    return tensors


def files_of_checkpoint(contents: Contents) -> dict[StateKey, Tensor]:
    """Return the tensors of a checkpoint that are files."""
    return {key: contents.read(key) for key in contents.tensors if key.kind is StateKind.FILE}


def as_files(tensors: Mapping[StateKey, Tensor]) -> dict[str, bytes]:
    """Return the content of the files by name; refuse names outside of a folder, and names of weights."""
    files = {key.name: bytes(tensor.numpy()) for key, tensor in tensors.items()}
    for name in files:
        if not _NAME.fullmatch(name) or _WEIGHTS.fullmatch(name):
            raise UserError(f"the checkpoint keeps a file {shown(name)}, which no Hugging Face folder has")
    return files


def has_tokenizer(files: Mapping[StateKey, Tensor], fingerprint: str) -> bool:
    """Return whether the files contain no other tokenizer than that of data with this fingerprint. One that
    cannot be compared, because it has no tokenizer.json, counts as another."""
    if (tokenizer := files.get(file_key(TOKENIZER))) is not None:
        return file_fingerprint(bytes(tokenizer.numpy())) == fingerprint
    return not any(_OF_TOKENIZERS.match(key.name) for key in files)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    with reading(folder):
        for subfolder in ("", "additional_chat_templates"):
            inside = folder / subfolder
            if not inside.is_dir() or (subfolder and inside.is_symlink()):
                continue
            for path in sorted(inside.iterdir()):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and _NAME.fullmatch(name) and not _WEIGHTS.fullmatch(name):
                    yield name, file_of(folder, path.name, subfolder)
