"""Codecs: what comes back, how far it is from what was sent, and the bytes between, against numpy and the
papers' bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.codecs import parse_codec, parse_row_codec
from shardwise.codecs.base import BLOCK, SPARSE_BLOCK
from shardwise.codecs.packing import pack, unpack

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
SIZES = [0, 1, 2, 5, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 3 * SPARSE_BLOCK, 300 * BLOCK + 5]
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4}
"""Of each number, what rounding to so many bits may cost, where it is not far below its block's largest."""


def coded(name: str, rows: Tensor, seed: int = 5) -> Tensor:
    how = parse_row_codec(name)
    wire = how.encode(rows, seed)
    assert wire.dtype == torch.uint8
    return decoded(name, wire, rows, seed)


def decoded(name: str, wire: Tensor, like: Tensor, seed: int) -> Tensor:
    rows = torch.full_like(like, 7.0)
    parse_row_codec(name).decode(wire, rows, seed)
    return rows


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_the_bytes_are_those_of_the_formula_and_the_shape_comes_back(name: str, size: int) -> None:
    codec = parse_row_codec(name)
    rows = normal(3, size)
    assert codec.encode(rows, 1).shape == (3, codec.wire_bytes(size))
    assert coded(name, rows).shape == rows.shape
    assert coded(name, rows.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "size", "bytes_"),
    [
        ("bfloat16", 1000, 2000),
        ("int8", 1000, 2 * 512 + 8),
        ("int4", 1001, 2 * 256 + 8),
        ("float8", 512, 512 + 4),
        ("float16", 513, 2 * 1024 + 8),
        ("sign", 1 << 20, (1 << 17) + 4 * 2048),
        ("terngrad", 1001, 2 * 128 + 8),
        ("qsgd(3)", 1000, 2 * 192 + 8),
        ("topk(0.01)", 1 << 20, 11 * 1024 * 4),
        ("randomk(0.01)", 1000, 40),
    ],
)
def test_bytes_worked_out_by_hand(name: str, size: int, bytes_: int) -> None:
    assert parse_row_codec(name).wire_bytes(size) == bytes_


@pytest.mark.parametrize(
    ("name", "share"), [("topk(0.01)", 0.022), ("sign", 1 / 28), ("qsgd(4)", 1 / 7.5), ("int8", 0.26)]
)
def test_a_gradient_of_a_million_numbers_becomes_so_small(name: str, share: float) -> None:
    codec = parse_row_codec(name)
    assert (codec.wire_bytes(10**6) + codec.for_sums().wire_bytes(10**6)) / 2 <= share * 4e6


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_packed_bits_are_numpys_in_planes_and_come_back(bits: int, eighth: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 8 * eighth), dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits)
    numbers = codes.reshape(rows, 8, eighth).transpose(0, 2, 1)  # the eight that share bytes, side by side
    stream = (numbers[..., None] >> np.arange(bits, dtype=np.uint8)) & 1  # lowest bit first
    expected = np.packbits(stream.reshape(rows, eighth, 8 * bits), axis=2, bitorder="little").transpose(
        0, 2, 1
    )
    assert np.array_equal(packed.numpy(), expected.reshape(rows, -1))
    assert np.array_equal(unpack(packed, bits).numpy(), codes)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8"])
def test_short_floats_round_each_number_by_no_more_than_their_bits(name: str) -> None:
    rows = normal(2, 5 * BLOCK + 3)
    kept = coded(name, rows)
    near = rows.abs() > rows.abs().max() / 50  # further down float8 has fewer bits
    assert ((kept - rows).abs() <= RELATIVE[name] * rows.abs() * 1.001)[near].all()


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_whole_multiples_are_the_nearest_of_their_block(name: str, most: int) -> None:
    rows = normal(2, 2 * BLOCK, dtype=torch.float64)
    blocks = rows.numpy().reshape(4, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True).astype(np.float32).astype(np.float64)
    expected = np.round(blocks / scale * most) / most * scale
    np.testing.assert_allclose(coded(name, rows).numpy().reshape(4, BLOCK), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        *("terngrad", "qsgd(4)", "qsgd(8)"),
        *(pytest.param(f"qsgd({bits})", marks=pytest.mark.full) for bits in (2, 3, 5, 6, 7)),
    ],
)
def test_the_mean_of_many_draws_is_the_number_itself(name: str) -> None:
    row, draws = normal(1, BLOCK + 40, dtype=torch.float64), 600
    mean = torch.stack([coded(name, row, seed) for seed in range(draws)]).mean(0)
    most = 1 if name == "terngrad" else 2 ** (int(name[5]) - 1) - 1
    deviation = float(row.abs().max()) / most / 2  # of a draw between two neighbours, at most
    expected = row
    if name == "terngrad":  # beyond 2.5 deviations of its block a number is cut off, as in the paper
        most = torch.cat(
            [2.5 * part.square().mean().sqrt().expand(len(part)) for part in (row[0, :BLOCK], row[0, BLOCK:])]
        )
        expected = row.clamp(-most, most)
        assert (expected != row).any()
    assert ((mean - expected).abs() <= 5 * deviation / math.sqrt(draws) + 1e-6).all()
    assert not torch.equal(coded(name, row, 1), coded(name, row, 2))
    assert torch.equal(coded(name, row, 1), coded(name, row, 1))


@given(st.integers(1, 3000), st.sampled_from([0.001, 0.01, 0.3, 1.0]), st.integers(0, 99))
@settings(max_examples=60)
def test_of_each_block_the_largest_are_kept_and_leave_the_smaller_part(
    size: int, share: float, seed: int
) -> None:
    row, count = normal(1, size, seed=seed), math.ceil(share * SPARSE_BLOCK)
    kept = coded(f"topk({share})", row)
    for first in range(0, size, SPARSE_BLOCK):
        block, own = (numbers[0, first : first + SPARSE_BLOCK] for numbers in (row, kept))
        order = torch.from_numpy(np.argsort(-np.abs(block.numpy()), kind="stable")[:count].copy())
        assert set(own.nonzero().flatten().tolist()) == set(order.tolist())
        assert torch.equal(own[order], block[order].bfloat16().float())
        left = max(0.0, 1 - count / len(block)) + 2.0**-16
        assert (block - own).square().sum() <= left * block.square().sum() * (1 + 1e-6)


def test_signs_leave_what_karimireddys_bound_says() -> None:
    rows = normal(1, 8 * BLOCK)
    kept = coded("sign", rows)
    for block, own in zip(rows.view(8, BLOCK), kept.view(8, BLOCK), strict=True):
        density = float(block.abs().sum() ** 2 / (BLOCK * block.square().sum()))
        left = float((block - own).square().sum() / block.square().sum())
        assert left == pytest.approx(1 - density, rel=1e-4)


def test_random_places_are_all_equally_likely_and_the_same_for_every_device() -> None:
    rows, draws = torch.ones(2, 103), 2000
    kept = sum(coded("randomk(0.1)", rows, seed) for seed in range(draws))
    assert isinstance(kept, Tensor)
    assert torch.equal(kept[0], kept[1])
    share = 11 / 103
    assert (kept / draws - share).abs().max() < 5 * math.sqrt(
        share / draws
    ) + 1 / 90  # stretches are 9 or 10 long
    assert kept.sum() == 2 * 11 * draws


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_in_its_row_and_nowhere_else(name: str, bad: float) -> None:
    rows = normal(3, 2 * BLOCK + 9)
    honest = coded(name, rows)
    rows[1, 700] = bad
    kept = coded(name, rows)
    assert not kept[1].isfinite().all()
    assert kept[[0, 2]].isfinite().all()
    if "qsgd" not in name and name != "terngrad":  # whose draws are of the whole
        assert torch.equal(kept[0], honest[0])


@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_what_is_taken_and_what_is_left_are_the_numbers(name: str, dtype: torch.dtype, size: int) -> None:
    rows, how = normal(2, size, dtype=dtype), parse_row_codec(name)
    left = rows.clone()
    wire = how.encode(left, 3, subtract=True)
    assert torch.equal(wire, how.encode(rows, 3))
    torch.testing.assert_close(
        left, rows - decoded(name, wire, rows, 3), rtol=0, atol=4 * 2.0**-22
    )  # two roundings of numbers below 4
    added = rows.clone()
    how.decode(wire, added, 3, add=True)
    torch.testing.assert_close(
        added, rows + decoded(name, wire, rows, 3), rtol=0, atol=4 * 2.0**-22
    )  # two roundings of numbers below 4
    rows[0, 0] = math.inf
    how.encode(rows, 3, subtract=True)
    assert rows.isfinite().all(), "what cannot be sent does not stay"


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name: str) -> None:
    assert torch.equal(coded(name, torch.zeros(2, BLOCK + 3)), torch.zeros(2, BLOCK + 3))


@pytest.mark.parametrize("name", [name for name in ALL if name != "bfloat16" and "topk" not in name])
def test_one_number_alone_comes_back_as_it_is(name: str) -> None:
    row = torch.tensor([[-0.37]])
    assert float(coded(name, row)) == pytest.approx(-0.37, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_numbers_at_the_ends_of_the_range_keep_their_size(name: str, size: float) -> None:
    rows = (normal(1, 2 * BLOCK) * size).float()
    kept = coded(name, rows)
    assert kept.isfinite().all()
    assert kept.abs().max() <= rows.abs().max() * 1.01
    if "k(" not in name:
        assert kept.abs().sum() > 0


@pytest.mark.parametrize("text", ["", "zip", "topk", "topk()", "topk(0)", "topk(2)", "topk(x)", "qsgd(9)",
"qsgd(2.5)", "int8(3)",
                                  "powersgd(0)", "topk(nan)", "randomk(-1)", "qsgd(4",
                                  "int8 int8"])  # fmt: skip
def test_what_is_no_codec_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|one of"):
        parse_codec(text)


@pytest.mark.parametrize("text", [*ALL, "powersgd(4)"])
def test_a_codec_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_codec(text)) == text
