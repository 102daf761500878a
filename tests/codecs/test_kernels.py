"""Codecs on a GPU make the bytes that they make on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.codecs import parse_row_codec
from shardwise.codecs.base import BLOCK

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ALL = [
    "bfloat16",
    "float16",
    "float8",
    "int8",
    "int4",
    "sign",
    "terngrad",
    "topk(0.01)",
    "topk(1)",
    "randomk(0.1)",
]
ALL += [f"qsgd({bits})" for bits in range(2, 9)]
SIZES = [0, 1, 2, 5, 7, 8, 102, 103, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 1024, 3072, 65541, 400003]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "tiny", "nan"])
@pytest.mark.parametrize("name", ALL)
def test_bytes_and_numbers_are_those_of_a_cpu(name: str, kind: str, size: int) -> None:
    how, rows = (
        parse_row_codec(name),
        torch.randn(3, size, generator=torch.Generator().manual_seed(size)),
    )
    if kind == "zeros":
        rows.zero_()
    elif kind == "equal":
        rows.fill_(-0.3)
    elif kind == "tiny":
        rows *= 1e-38
    elif kind == "nan" and size:
        rows[1, size // 2] = math.nan
    wire = how.encode(rows, 5)
    here = how.encode(rows.cuda(), 5).cpu()
    finite = [0, 2] if kind == "nan" else [0, 1, 2]
    blocks = -(-size // BLOCK)
    if name == "sign":  # means are added up in another order
        assert torch.equal(wire[finite, : 64 * blocks], here[finite, : 64 * blocks])
    elif name == "terngrad":  # and so are deviations, by which one or the other draw may fall otherwise
        apart = wire[finite, : 128 * blocks] != here[finite, : 128 * blocks]
        assert apart.float().mean() < 1e-3 if size else True
    elif not ("topk" in name and kind in ("equal", "zeros")):  # of equal numbers a CPU takes any
        assert torch.equal(wire[finite], here[finite])
    for add in (False, True):
        decoded, there = torch.ones_like(rows), torch.ones_like(rows, device="cuda")
        how.decode(here, decoded, 5, add)
        how.decode(here.cuda(), there, 5, add)
        torch.testing.assert_close(decoded, there.cpu(), rtol=0, atol=2.0**-21 if add else 0, equal_nan=True)
        assert bool(decoded.isfinite().all()) == (kind != "nan" or not size)
    left, kept = rows.cuda(), torch.zeros_like(rows)
    assert torch.equal(how.encode(left, 5, subtract=True).cpu()[finite], here[finite])
    how.decode(here, kept, 5)
    bound = float(rows.nan_to_num(0).abs().max()) * 2.0**-21 if size else 0.0
    torch.testing.assert_close(left.cpu()[finite], (rows - kept)[finite], rtol=0, atol=bound)
    assert left.isfinite().all()
