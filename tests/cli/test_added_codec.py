"""A codec that another distribution adds by an entry point, as a user of it meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm import ROOT

CODEC = '''
"""Every number in float64: larger, and exact."""

from dataclasses import dataclass

import torch

from shardwise.codecs import RowCodec


@dataclass(frozen=True)
class Wide(RowCodec):
    name = "wide"
    host_nanoseconds = (1.0, 1.0)
    gpu_share = 0.5

    def wire_bytes(self, numbers):
        return 8 * numbers

    def encode_rows(self, rows, seed, subtract):
        wide = rows.to(torch.float64, copy=True)
        if subtract:
            rows.zero_()
        return wide.view(torch.uint8)

    def decode_rows(self, wire, rows, seed, add):
        wide = wire.view(torch.float64)
        rows.add_(wide) if add else rows.copy_(wide)
'''


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], str]:
    """Put a distribution with this entry point into a folder; returns the path to import from."""

    def into_folder(named: str) -> str:
        (tmp_path / "wide_codec.py").write_text(CODEC)
        info = tmp_path / "wide_codec-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-codec\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[shardwise.codecs]\nwide = {named}\n")
        return f"{tmp_path}:{ROOT}"

    return into_folder


def test_a_codec_of_another_distribution_is_proven_like_ours(shardwise_of_a_user: Any, install) -> None:
    done = shardwise_of_a_user(
        *("verify", "examples/verify.toml", "layout.data=2", "layout.compression=wide", "--steps", "1"),
        PYTHONPATH=install("wide_codec:Wide"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("wide_codec:Narrow", "cannot be imported: AttributeError"),
        ("no_such_module:Wide", "cannot be imported: ModuleNotFoundError"),
        ("wide_codec:torch", "is no subclass of shardwise.codecs.RowCodec"),
    ],
)
def test_a_broken_entry_point_is_named_with_its_distribution(
    shardwise_of_a_user: Any, install, named: str, says: str
) -> None:
    done = shardwise_of_a_user(
        *("train", "examples/quickstart.toml", "layout.compression=wide"), PYTHONPATH=install(named)
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert f"({named}, entry point group shardwise.codecs)" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
