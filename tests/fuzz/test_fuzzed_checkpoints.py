"""Checkpoints and Hugging Face folders: the tensors that were written, or a refusal; nothing outside of the
folder is read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.damage import (
    SOME_AND_MANY,
    as_json,
    damaged,
    lacking,
    nothing_outside,
    read_or_refused,
    rewritten,
    sealed,
)
from ranks.jobs import ALONE, job, start
from torch import Tensor

from shardwise.checkpoint import read_manifest
from shardwise.checkpoint.folder import MANIFEST, Manifest
from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.checkpoint.pretrained import open_folder
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.storage import storage
from shardwise.checkpoint.tensor_files import (
    Contents,
    StoredTensor,
    TensorPiece,
    commit,
    data_file,
    write_checkpoint,
)
from shardwise.cli.checkpoint import list_
from shardwise.config import Model
from shardwise.config.parameters import parameter_shapes
from shardwise.errors import UserError
from shardwise.files import unseal
from shardwise.train.build import Training, restore, save
from shardwise.train.changes import changes
from shardwise.train.steps import steps

TINY = Model(layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=12, vocabulary=19, max_positions=16)
WHOLE = {
    StateKey.model("a"): torch.arange(48.0).view(6, 8),
    StateKey.model("b"): torch.arange(10),
    StateKey.model("c"): torch.tensor(3.0),
}
TENSORS, DATA = "tensors-0a.json", "rank-1-0a.data"
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint by two ranks, each with a part of two tensors; and beside it a file that nobody may
    read."""
    where, files = storage(tmp_path / "step-3"), {}
    pieces: dict[StateKey, list[TensorPiece]] = defaultdict(list)
    where.make()
    for rank in (0, 1):
        name = f"rank-{rank}-0a.data"
        with data_file(where, name) as data:
            for key, tensor in WHOLE.items():
                if tensor.ndim or rank == 0:
                    part, offset = part_of(tensor, rank)
                    pieces[key].append(TensorPiece(offset, tuple(part.shape), name, data.append(part)))
            files[name] = data.size_and_crc()
    stored = {
        key: StoredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(pieces[key]))
        for key, tensor in WHOLE.items()
    }
    commit(
        where,
        Manifest(3, TINY.model_dump(exclude={"preset"}), {}, {}, {}, {}, 2, "2", {}),
        stored,
        files,
        "0a",
    )
    (tmp_path / "x.bin").write_bytes(bytes(1000))
    return tmp_path / "step-3"


def part_of(tensor: Tensor, rank: int) -> tuple[Tensor, tuple[int, ...]]:
    """Columns of a matrix, rows of a vector."""
    if tensor.ndim == 0:
        return tensor, ()
    dim = tensor.ndim - 1
    part = tensor.chunk(2, dim)[rank]
    return part, (0,) * dim + (rank * tensor.chunk(2, dim)[0].shape[dim],)


def everything(folder: Path) -> Tensors:
    contents = Contents.open(folder)
    contents.check()
    assert_pieces_fill(contents)
    return {name: contents.read(name) for name in contents.tensors}


def assert_pieces_fill(contents: Contents) -> None:
    """Each number of a tensor is in one piece, and each byte of a file in at most one: counted one by one."""
    used = {name: np.zeros(file["bytes"], np.int64) for name, file in contents.manifest.files.items()}
    for stored in contents.tensors.values():
        covered = np.zeros(stored.shape, np.int64)
        for piece in stored.pieces:
            covered[
                tuple(
                    slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True)
                )
            ] += 1
            used[piece.file][piece.start : piece.start + stored.bytes_of(piece.shape)] += 1
        assert (covered == 1).all()
    assert all((counts <= 1).all() for counts in used.values())


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def sign(folder: Path, name: str, content: bytes) -> None:
    """Other content for a file, and a manifest that says so: not damage, but a hand that knows the format."""
    (folder / name).write_bytes(content)
    values = json.loads(unseal((folder / MANIFEST).read_bytes()) or b"")
    values["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / MANIFEST).write_bytes(sealed(values))


@pytest.mark.parametrize("count", SOME_AND_MANY)
@pytest.mark.parametrize("name", [MANIFEST, TENSORS, DATA])
def test_a_damaged_file_is_never_read_as_something_else(folder: Path, name: str, count: int) -> None:
    assert same(everything(folder), WHOLE)
    content = (folder / name).read_bytes()
    for changed in damaged(content, 15, count):
        (folder / name).write_bytes(changed)
        tensors = read_or_refused(lambda: everything(folder), changed)
        assert tensors is None if changed != content else same(tensors or {}, WHOLE)


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_manifest_that_a_hand_has_changed_and_sealed_again_holds_the_same_tensors_or_is_refused(
    folder: Path, count: int
) -> None:
    values, taken = json.loads(unseal((folder / MANIFEST).read_bytes()) or b""), 0
    for changed in rewritten(values, 16, 2 * count):
        (folder / MANIFEST).write_bytes(sealed(changed))
        with nothing_outside(folder):
            tensors = read_or_refused(lambda: everything(folder), changed)
        assert tensors is None or same(tensors, WHOLE)
        taken += tensors is not None
    assert taken


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> tuple[Training, Path]:
    """A run in float16, and the checkpoint that it wrote: no table of its manifest is empty."""
    folder = tmp_path_factory.mktemp("run")
    training = start(ALONE, job(corpus, train={"precision": "float16"}, run={"folder": str(folder)}))
    next(steps(training))
    return training, Path(save(training))


def go_on(training: Training, folder: Path, exported: Path) -> bool:
    """What a manifest is read for: to list checkpoints, to export one, and to go on with a run."""
    with contextlib.redirect_stdout(io.StringIO()):
        list_(str(folder))
    list(changes(read_manifest(folder), training.config))
    restore(training, str(folder))
    shutil.rmtree(exported, ignore_errors=True)
    export_checkpoint(str(folder), exported)
    return True


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_the_manifest_of_a_run_that_a_hand_has_changed_is_used_or_refused(
    run: tuple[Training, Path], tmp_path: Path, count: int
) -> None:
    training, folder = run
    content = (folder / MANIFEST).read_bytes()
    values, taken = json.loads(unseal(content) or b""), 0
    parts = {key: values[key] for key in ("layout", "loss_scale", "data")}
    changed_parts = [*lacking(parts), *rewritten(parts, 18, count // 2)]
    cases = [*({**values, **part} for part in changed_parts), *rewritten(values, 19, count // 2)]
    for changed in cases:
        (folder / MANIFEST).write_bytes(sealed(changed))
        taken += bool(read_or_refused(lambda: go_on(training, folder, tmp_path / "exported"), changed))
    (folder / MANIFEST).write_bytes(content)
    assert taken


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_list_of_tensors_that_a_hand_has_changed_has_pieces_that_fill_them_or_is_refused(
    folder: Path, count: int
) -> None:
    values, taken = json.loads((folder / TENSORS).read_bytes()), 0
    for changed in rewritten(values, 17, 6 * count):
        sign(folder, TENSORS, as_json(changed))
        with nothing_outside(folder):
            taken += read_or_refused(lambda: everything(folder), changed) is not None
    assert taken


@pytest.mark.parametrize(
    ("piece", "change", "reason"),
    [
        (1, {"offset": [0, 2]}, "the pieces of model.a do not fill it, each part once"),
        (1, {"offset": [0, 5]}, "reaches beyond it"),
        (1, {"offset": [0, 0]}, "do not fill it"),
        (0, {"file": "../x.bin"}, "a piece of model.a lies in '../x.bin'"),
        (0, {"start": 2**59}, "reaches beyond the end"),
        (0, {"start": 64}, "share bytes of rank-0-0a.data"),
        (0, {"start": "0"}, "model.a.pieces[0].start = '0'"),
    ],
)
def test_pieces_that_no_save_writes_are_refused(
    folder: Path, piece: int, change: dict[str, Any], reason: str
) -> None:
    values = json.loads((folder / TENSORS).read_bytes())
    values["model.a"]["pieces"][piece] |= change
    sign(folder, TENSORS, as_json(values))
    with pytest.raises(UserError) as refusal:
        everything(folder)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS, DATA])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")
    with pytest.raises(UserError, match="is a link that leads out of its folder"), nothing_outside(folder):
        everything(folder)


# -- Hugging Face --------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A model of theirs in several files."""
    tensors = ((StateKey.model(name), torch.randn(shape)) for name, shape in parameter_shapes(TINY).items())
    manifest = Manifest(
        3, TINY.model_dump(exclude={"preset"}), {}, {"tokenizer": "bytes"}, {}, {}, 1, "2", {}
    )
    write_checkpoint(tmp_path / "step-3", manifest, tensors)
    export_checkpoint(str(tmp_path / "step-3"), tmp_path / "model", shard_bytes=2000)
    return tmp_path / "model"


def their_tensors(folder: Path) -> Tensors:
    return dict(open_folder(folder).read())


@pytest.mark.parametrize("count", SOME_AND_MANY)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_folder_of_theirs_is_a_whole_model_or_is_refused(theirs: Path, name: str, count: int) -> None:
    whole, content = their_tensors(theirs), (theirs / name).read_bytes()
    contents = [*damaged(content, 18, count), *map(as_json, rewritten(json.loads(content), 19, 2 * count))]
    for changed in contents:
        (theirs / name).write_bytes(changed)
        with nothing_outside(theirs):
            tensors = read_or_refused(lambda: their_tensors(theirs), changed)
        assert tensors is None or {key: value.shape for key, value in tensors.items()} == {
            key: value.shape for key, value in whole.items()
        }


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_damaged_header_of_weights_is_refused_or_says_the_same(theirs: Path, count: int) -> None:
    path = sorted(theirs.glob("*.safetensors"))[0]
    shapes, content = {key: value.shape for key, value in their_tensors(theirs).items()}, path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for changed in damaged(content[:end], 20, 3 * count):
        path.write_bytes(changed + content[end:])
        tensors = read_or_refused(lambda: their_tensors(theirs), changed)
        assert tensors is None or {key: value.shape for key, value in tensors.items()} == shapes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 2**62}, "less than or equal to 16777216"),
        ({"num_hidden_layers": 10**6}, "less than or equal to 4096"),
        ({"layer_types": 7}, "layer_types = 7: not a list"),
        ({"layer_types": [[["x"]]]}, "layer_types holds"),
        ({"sliding_window": "4"}, "sliding_window = '4': not a number"),
    ],
)
def test_a_configuration_of_theirs_beyond_reason_is_refused_by_key(
    theirs: Path, change: dict[str, Any], reason: str
) -> None:
    config = json.loads((theirs / "config.json").read_bytes())
    (theirs / "config.json").write_bytes(as_json({**config, **change}))
    with pytest.raises(UserError) as refusal:
        open_folder(theirs)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "nowhere"])
def test_a_link_to_what_is_no_regular_file_is_refused_by_name(theirs: Path, name: str, target: str) -> None:
    os.mkfifo(theirs / "pipe")
    (theirs / name).unlink()
    (theirs / name).symlink_to(target)
    with pytest.raises(UserError, match=f"{name} is a link to {target}, which is not"):
        their_tensors(theirs)
