"""Read a Hugging Face folder into a checkpoint, one tensor at a time, to train the model further.

config.json says what the tensors must be (config/model_config.py), and the headers of the files say what they
are. Both are compared before any tensor is read, and one message names all tensors that are missing, left
over or of another shape.

Headers are read without torch, so that a job's weights are checked before anything starts
(library/check_job.py). The files are read with the safetensors library, because a folder from elsewhere is
not trusted and the library checks headers well; the index may name no file outside of the folder, though a
file may be a link to one. Pickled weights are refused: opening them runs code.

The checkpoint has step 0 and only weights, in the dtype of the folder, and the folder's other files
(huggingface_files.py). It needs memory for the largest tensor, for experts for those of one layer: files are
mapped, and released after each tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.checkpoint.conversions import to_ours
from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.storage import storage
from shardwise.config.dtype_names import BYTES
from shardwise.config.families import Family
from shardwise.config.family_tensors import TensorMatch, tensor_matches, their_shapes
from shardwise.config.model import Model
from shardwise.config.parameters import parameter_shapes
from shardwise.config.pretrained_folder import CONFIG, TOKENIZER, file_of, read_model
from shardwise.errors import UserError
from shardwise.files import parse_as, read_bytes, reading

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int, int, int], None]
"""A function that is called with tensors done, tensors in all, bytes done, bytes in all."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of dtypes in a safetensors header, by ours."""
OUR_DTYPES = {header: name for name, header in HEADER_DTYPES.items()}
SHOWN = 8
"""Number of names that a message lists; the others are counted."""
HEAD = "lm_head.weight"
_BUFFERS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Constants that older versions of the library saved beside the weights."""


def no_progress(*_: int) -> None:
    """Ignore progress: the default of functions that report it."""


@dataclass(frozen=True)
class FolderTensor:
    """A tensor of a folder: its file, its name there, and its shape and dtype from the header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in the header."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * BYTES[OUR_DTYPES[self.dtype]]

    def read(self) -> Tensor:
        """Return the tensor. The file is opened for each tensor, so that no more of it stays mapped."""
        with _opened(self.file, "pt") as stream:
            tensor: Tensor = stream.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class Pretrained:
    """A folder whose headers are compared with its config.json. Its tensors are not read yet."""

    folder: Path
    model: Model
    plan: list[TensorMatch]
    stored: Mapping[str, FolderTensor]
    tokenizer: Path | None

    @property
    def tensors(self) -> int:
        """Number of our tensors that `read` will yield."""
        return sum(len(match.ours) for match in self.plan)

    @property
    def bytes(self) -> int:
        """Size of all weights in bytes."""
        names = [name for match in self.plan for name in match.theirs]
        return sum(self.stored[name].bytes for name in names)

    def read(self, progress: Progress = no_progress) -> Iterator[tuple[str, Tensor]]:
        """Yield our tensors with their names, one by one."""
        count = done = 0
        if self.model.tied:
            self._check_tied()
        for match in self.plan:
            read = [self.stored[name].read() for name in match.theirs]
            done += sum(tensor.nbytes for tensor in read)
            for name, tensor in zip(match.ours, to_ours(match, read), strict=True):
                count += 1
                yield name, tensor.contiguous()
                progress(count, self.tensors, done, self.bytes)

    def _check_tied(self) -> None:
        """Refuse a head that differs from the embedding with which it should be tied."""
        import torch

        if head := self.stored.get(HEAD):
            table = next(match.theirs[0] for match in self.plan if match.ours == ("embedding.weight",))
            if not torch.equal(head.read(), self.stored[table].read()):
                raise UserError(
                    f"{self.folder / CONFIG} has tie_word_embeddings = true, but {head.name} and "
                    f"{self.stored[table].name} differ; write false there if the model has a head of its own"
                )


def open_folder(folder: Path) -> Pretrained:
    """Read config.json and the headers of the weights, and refuse models that shardwise does not support."""
    family, model = read_model(folder)
    stored = _stored_tensors(folder, family)
    fused = _is_fused(family, model, stored)
    plan = tensor_matches(family.tensors, model, fused)
    _check_tensors(folder, model, plan, stored)
    tokenizer = file_of(folder, TOKENIZER)
    return Pretrained(folder, model, plan, stored, tokenizer if tokenizer.is_file() else None)


def check_tokenizer(pretrained: Pretrained) -> None:
    """Refuse a folder without a tokenizer, whose model cannot be given text."""
    if pretrained.tokenizer is None:
        raise UserError(
            f"{pretrained.folder} has no {TOKENIZER}, so the model cannot be asked in words; put that of the "
            "model there"
        )


def check_empty(folder: Path) -> None:
    """Refuse to write to a folder that is not empty."""
    with reading(folder, "Give another folder."):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already and not empty; give another folder, or remove it")


def import_folder(folder: Path, checkpoint: str, progress: Progress = no_progress) -> Pretrained:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, without optimizer state."""
    if storage(checkpoint).names():
        raise UserError(f"{checkpoint} is there already and not empty; give another folder, or remove it")
    pretrained = open_folder(folder)
    import torch  # only now: what is refused above is refused at once

    from shardwise.checkpoint.huggingface_files import files_of_folder
    from shardwise.checkpoint.tensor_files import write_checkpoint

    data = {} if pretrained.tokenizer is None else {"tokenizer": str(pretrained.tokenizer.absolute())}
    manifest = Manifest(
        0, pretrained.model.settings(), {}, data, {}, {}, world=1, torch=str(torch.__version__), files={}
    )
    weights = ((StateKey.model(name), tensor) for name, tensor in pretrained.read(progress))
    write_checkpoint(checkpoint, manifest, chain(weights, files_of_folder(folder).items()))
    return pretrained


def _stored_tensors(folder: Path, family: Family) -> dict[str, FolderTensor]:
    """Return the tensors in the folder by their full names, without constants."""
    tensors: dict[str, FolderTensor] = {}
    for file, promised in _files(folder).items():
        with _opened(file_of(folder, file), "np") as stream:
            present = set(stream.keys())
            if absent := sorted((promised or set()) - present):
                raise UserError(f"{folder / file} lacks {join_names(absent)}, which {INDEX} says it holds")
            for name in sorted(promised or present):
                if not _BUFFERS.search(name):
                    part = stream.get_slice(name)
                    tensor = FolderTensor(folder / file, name, tuple(part.get_shape()), part.get_dtype())
                    if (known := tensors.setdefault(_full_name(name, family), tensor)) is not tensor:
                        raise UserError(
                            f"{folder / file} has {name}, which {known.file} has as {known.name}; keep one"
                        )
    return tensors


def _full_name(name: str, family: Family) -> str:
    prefix = family.tensors.prefix
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Return the files with weights, and the tensors of each according to the index; None: there is no
    index."""
    if file_of(folder, INDEX).is_file():
        weight_map = parse_as(_WeightIndex, read_bytes(file_of(folder, INDEX)), folder / INDEX)["weight_map"]
        promised: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            promised.setdefault(file, set()).add(name)
        files: dict[str, set[str] | None] = {**promised}
        if absent := [file for file in files if not file_of(folder, file).is_file()]:
            raise UserError(
                f"{folder} lacks {join_names(sorted(absent))}, which {INDEX} names; download it again"
            )
        return files
    if file_of(folder, WEIGHTS).is_file():
        return {WEIGHTS: None}
    if pickled := sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    ):
        raise UserError(
            f"{folder} holds pickled weights ({join_names(pickled)}), which can run code when opened. "
            "Convert them to safetensors where you trust them: open the folder with transformers' "
            "from_pretrained and write it with save_pretrained."
        )
    raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")


def _is_fused(family: Family, model: Model, stored: Mapping[str, FolderTensor]) -> bool:
    if not family.tensors.fused:
        return False
    separate, together = (
        {name for match in tensor_matches(family.tensors, model, fused) for name in match.theirs}
        for fused in (False, True)
    )
    return len(stored.keys() & together) > len(stored.keys() & separate)


def _check_tensors(
    folder: Path, model: Model, plan: list[TensorMatch], stored: Mapping[str, FolderTensor]
) -> None:
    """Refuse tensors that are missing, left over, of another shape, or of an unsupported dtype."""
    ours = parameter_shapes(model)
    expected = {name: shape for match in plan for name, shape in their_shapes(match, ours).items()}
    allowed = expected.keys() | ({HEAD} if model.tied else set())
    common = {name: (shape, stored[name]) for name, shape in expected.items() if name in stored}
    problems = {
        "missing": [name for name in expected if name not in stored],
        "not part of such a model": [tensor.name for name, tensor in stored.items() if name not in allowed],
        "of another shape": _wrong_shapes(common),
        f"of a dtype other than {', '.join(OUR_DTYPES)}": _unsupported(stored, expected),
    }
    lines = [f"{kind}: {join_names(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UserError(f"the tensors in {folder} are not those of its {CONFIG}:\n  " + "\n  ".join(lines))


def _wrong_shapes(tensors: Mapping[str, tuple[tuple[int, ...], FolderTensor]]) -> list[str]:
    return [
        f"{tensor.name} has shape {tensor.shape} instead of {shape}"
        for shape, tensor in tensors.values()
        if tensor.shape != shape
    ]


def _unsupported(stored: Mapping[str, FolderTensor], expected: Container[str]) -> list[str]:
    tensors = [tensor for name, tensor in stored.items() if name in expected]
    return [f"{tensor.name} is {tensor.dtype}" for tensor in tensors if tensor.dtype not in OUR_DTYPES]


def join_names(names: list[str]) -> str:
    """Return names for a message, separated by commas; beyond the first few they are only counted."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


class _WeightIndex(TypedDict):
    """The entries of the index of several files that are read here."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/]+\.safetensors$")]]


@contextmanager
def _opened(path: Path, framework: Literal["np", "pt"]) -> Iterator[Any]:
    """Open a safetensors file; with `np`, which reads headers, without torch."""
    try:
        with safe_open(path, framework=framework, device="cpu") as stream:
            yield stream
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} cannot be read: {reason}") from None
