"""Codecs of other packages: one is imported when a job names it, and refused if it is not complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.codecs import parse_codec, parse_row_codec, weight_codecs
from shardwise.errors import UserError

CODE = '''
"""Codecs that round to float64, complete and not."""

from dataclasses import dataclass

import torch

from shardwise.codecs import MatrixCodec, RowCodec


@dataclass(frozen=True)
class Incomplete(RowCodec):
    name = "incomplete"
    gpu_share = 0.5

    def wire_bytes(self, numbers):
        return 8 * numbers

    def decode_rows(self, wire, rows, seed, add):
        numbers = wire.view(torch.float64)
        rows.add_(numbers) if add else rows.copy_(numbers)


@dataclass(frozen=True)
class Double(Incomplete):
    name = "double"
    for_weights = True
    host_nanoseconds = (1.0, 1.0)

    def encode_rows(self, rows, seed, subtract):
        return rows.to(torch.float64, copy=True).view(torch.uint8)


@dataclass(frozen=True)
class Factors(MatrixCodec):
    name = "factors"
    host_nanoseconds = (1.0, 1.0)
    gpu_share = 0.5
    memory_traffic = (8.0, 8.0)
    rank = 1
'''
ENTRIES = """[shardwise.codecs]
absent = no_such_module:Absent
double = double_codec:Double
factors = double_codec:Factors
incomplete = double_codec:Incomplete
misnamed = double_codec:Double
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the module and the metadata of a distribution that is installed there."""
    (tmp_path / "double_codec.py").write_text(CODE)
    metadata = tmp_path / "double_codec-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: double-codec\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "incomplete",
            "(double_codec:Incomplete, entry point group shardwise.codecs) lacks encode_rows, host",
        ),
        ("misnamed", "declares name = 'double'; give both the same name"),
        ("factors", "is no subclass of shardwise.codecs.RowCodec"),
    ],
)
def test_an_unusable_codec_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_codec(name)
    assert said in str(refusal.value)


def test_a_broken_package_does_not_disturb_jobs_with_other_codecs() -> None:
    assert str(parse_codec("topk(0.01)")) == "topk(0.01)"
    assert parse_row_codec("double").wire_bytes(3) == 24


def test_an_unknown_codec_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match=r"no codec 'zip'; one of bfloat16, .*, absent, double, factors"):
        parse_codec("zip")


def test_weights_may_be_gathered_with_it_if_it_says_so() -> None:
    assert str(parse_codec("double")) in weight_codecs()
