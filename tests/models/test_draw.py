"""Normal numbers by index: the published generator, the distribution, and the same bits of any slice on any
device."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardwise.models.draw as drawing
from shardwise.models.draw import draw, quantiles

WORD = (1 << 64) - 1
NORMAL = NormalDist()
TABLE = quantiles()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64 with ten rounds, from the paper."""
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        low, high = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = high >> 64 ^ b ^ left, high & WORD, low >> 64 ^ d ^ right, low & WORD
        left, right = left + 0x9E3779B97F4A7C15 & WORD, right + 0xBB67AE8584CAA73B & WORD
    return [a, b, c, d]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0] * 6, [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
        ([WORD] * 6, [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]),
    ],
)
def test_the_reference_gives_the_authors_known_answers(numbers: list[int], expected: list[int]) -> None:
    assert philox(numbers[:4], numbers[4:]) == expected


def whole(
    *shape: int,
    seed: int = 0,
    name: str = "weight",
    deviation: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return part(shape, tuple(slice(0, size) for size in shape), seed, name, deviation, dtype)


def part(
    shape: tuple[int, ...],
    held: tuple[slice, ...],
    seed: int = 0,
    name: str = "weight",
    deviation: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    own = torch.full([one.stop - one.start for one in held], math.nan, dtype=dtype, device=device)
    draw(own, TABLE * deviation, seed, name, shape, held)
    return own


def test_each_number_is_the_quantile_that_sixteen_bits_of_its_count_name() -> None:
    key = int.from_bytes(hashlib.blake2b(b"7:blocks.0.weight", digest_size=8).digest(), "little")
    words = [word for count in range(10) for word in philox([count + 1, 0, 0, 0], [key, 0])]
    bits = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
    variance = math.fsum(NORMAL.inv_cdf((i + 0.5) / 65536) ** 2 for i in range(65536)) / 65536
    expected = [0.02 * NORMAL.inv_cdf((place + 0.5) / 65536) / math.sqrt(variance) for place in bits]
    assert whole(160, seed=7, name="blocks.0.weight", deviation=0.02).tolist() == pytest.approx(
        expected, rel=1e-6
    )


def test_the_table_has_the_mean_and_the_variance_of_the_distribution() -> None:
    table = TABLE.double()
    assert table.mean() == 0
    assert table.square().mean().item() == pytest.approx(1, abs=1e-8)
    assert table.max().item() == pytest.approx(4.325, abs=5e-4)  # as the docstring says


@st.composite
def slices(chosen: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(chosen(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    bounds = [sorted(chosen(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, tuple(
        slice(0, size) if chosen(st.booleans()) else slice(*own)
        for size, own in zip(shape, bounds, strict=True)
    )


@given(
    slices(),
    st.sampled_from([7, 100, 1 << 18]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_slice_is_that_of_the_whole(
    where: tuple[tuple[int, ...], tuple[slice, ...]], at_once: int, dtype: torch.dtype
) -> None:
    shape, held = where
    expected = whole(*shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "CPU_CHUNK", at_once)
        assert torch.equal(part(shape, held, dtype=dtype), expected[held].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_numbers_go_into_any_dtype_and_any_strides(dtype: torch.dtype) -> None:
    own = torch.zeros(30, 8, dtype=dtype).T[:, ::2]
    draw(own, TABLE, 0, "weight", (8, 20), (slice(0, 8), slice(5, 20)))
    assert torch.equal(own, whole(8, 20)[:, 5:].to(dtype))


def test_nothing_is_made_but_what_is_held() -> None:
    """The whole would have 4 TiB."""
    shape, rows, columns = (1 << 20, 1 << 20), slice(1_000_000, 1_000_003), slice(999_000, 999_040)
    own = part(shape, (rows, columns))
    for index in (0, 1, 2):
        assert torch.equal(
            own[index], part((1 << 40,), (slice((start := (1_000_000 + index << 20) + 999_000), start + 40),))
        )
    assert part(shape, (slice(7, 7), slice(0, 1 << 20))).shape == (0, 1 << 20)


# The distribution. Numbers are fixed by seed and name, so nothing here can fail now and then.

MANY = 1 << 21


def test_numbers_are_normal() -> None:
    """Kolmogorov and Smirnov's distance, the first four moments, and how many are far out."""
    numbers = whole(MANY, name="distribution").double()
    ordered = numbers.sort().values
    below = torch.special.ndtr(ordered)
    steps = torch.arange(MANY + 1, dtype=torch.float64) / MANY
    distance = max((steps[1:] - below).max().item(), (below - steps[:-1]).max().item())
    assert distance < 1.63 / math.sqrt(MANY)  # exceeded by one in a hundred seeds
    assert abs(numbers.mean().item()) < 3 / math.sqrt(MANY)
    assert abs(numbers.square().mean().item() - 1) < 3 * math.sqrt(2 / MANY)
    assert abs(numbers.pow(3).mean().item()) < 3 * math.sqrt(15 / MANY)
    assert abs(numbers.pow(4).mean().item() - 3) < 3 * math.sqrt(96 / MANY)
    for deviations in (1, 2, 3, 4):
        share = 2 * NORMAL.cdf(-deviations)
        found = (numbers.abs() > deviations).double().mean().item()
        assert abs(found - share) < 3.5 * math.sqrt(share / MANY) + 2 / 65536, deviations


def test_numbers_tell_nothing_of_each_other() -> None:
    """Within a count, from count to count, from row to row, between names and between seeds: no correlation,
    of them or of their squares."""
    numbers, size = whole(MANY + 4096, name="a"), MANY
    pairs = {
        f"{lag} apart": (numbers[:size], numbers[lag : lag + size])
        for lag in (1, 2, 3, 4, 8, 15, 16, 17, 64, 1024, 4096)
    }
    others = {
        "seeds": {"seed": 1, "name": "a"},
        "far seeds": {"seed": 1 << 32, "name": "a"},
        "names": {"name": "b"},
    }
    for what, other in others.items():
        pairs[what] = numbers[:size], whole(size, **other)  # type: ignore[arg-type]
    for what, (left, right) in pairs.items():
        for of in (lambda x: x, lambda x: (x.square() - 1) / math.sqrt(2)):
            correlation = (of(left.double()) * of(right.double())).mean().item()
            assert abs(correlation) < 4 / math.sqrt(size), what


def test_each_of_the_sixteen_numbers_of_a_count_is_normal_by_itself() -> None:
    lanes = whole(MANY, name="lanes").double().view(-1, 16)
    size = len(lanes)
    assert (lanes.mean(0).abs() < 4 / math.sqrt(size)).all()
    assert ((lanes.square().mean(0) - 1).abs() < 4 * math.sqrt(2 / size)).all()


@pytest.mark.parametrize("shape", [(512, 512), (500, 1000), (256, 2048)])
def test_a_matrix_has_the_singular_values_of_a_random_one(shape: tuple[int, int]) -> None:
    """Between the edges of Marchenko and Pastur's law, to which rows or columns that are alike do not
    keep."""
    values = torch.linalg.svdvals(whole(*shape, name="matrix").double())
    rows, columns = map(math.sqrt, shape)
    assert rows + columns - 3 < values.max().item() < rows + columns + 2
    assert values.min().item() > max(columns - rows - 2, 1e-4)


# On a GPU


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((1000, 777), (slice(0, 1000), slice(0, 777))),
        ((1000, 777), (slice(501, 999), slice(0, 777))),
        ((1000, 777), (slice(0, 1000), slice(259, 518))),
        ((1000, 777), (slice(33, 34), slice(5, 6))),
        ((9, 60, 70), (slice(3, 6), slice(0, 60), slice(0, 70))),
        ((9, 60, 70), (slice(3, 6), slice(10, 31), slice(0, 70))),
        ((9, 60, 70), (slice(3, 6), slice(10, 31), slice(35, 70))),
        ((3, 4, 5, 6), (slice(1, 3), slice(1, 3), slice(2, 5), slice(1, 4))),
        ((4, 1), (slice(1, 4), slice(0, 1))),
        ((4, 9), (slice(4, 4), slice(0, 9))),
        ((70_000, 70_000), (slice(69_000, 69_003), slice(0, 70_000))),
        ((70_000, 70_000), (slice(69_000, 69_100), slice(69_001, 69_900))),
    ],
)
def test_a_gpu_draws_the_bits_of_a_cpu(
    shape: tuple[int, ...], held: tuple[slice, ...], dtype: torch.dtype
) -> None:
    expected = part(shape, held, seed=3, deviation=0.02, dtype=dtype)
    found = part(shape, held, seed=3, deviation=0.02, dtype=dtype, device="cuda")
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected)


@needs_gpu
@pytest.mark.parametrize("seed", range(8))
def test_a_gpu_draws_under_any_key(seed: int) -> None:
    """Half of the keys have their highest bit set."""
    shape, held = (100, 64), (slice(0, 100), slice(0, 64))
    assert torch.equal(part(shape, held, seed, device="cuda").cpu(), part(shape, held, seed))


@needs_gpu
def test_a_gpu_writes_nothing_beside_its_part() -> None:
    around = torch.full((1002, 259), math.nan, device="cuda")
    held = slice(0, 1000), slice(259, 518)
    draw(around[1:1001], TABLE, 0, "weight", (1000, 777), held)
    assert around[[0, -1]].isnan().all()
    assert torch.equal(around[1:1001].cpu(), part((1000, 777), held))


@needs_gpu
def test_a_gpu_without_a_compiler_gets_the_same_numbers_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_drawing_device", lambda device: torch.device("cpu"))
    shape, held = (1000, 777), (slice(0, 1000), slice(259, 518))
    assert torch.equal(part(shape, held, device="cuda").cpu(), part(shape, held))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_draws_what_a_cpu_keeps(dtype: torch.dtype) -> None:
    shape, held = (1000, 777), (slice(0, 1000), slice(259, 518))
    kept = torch.empty(1000, 259, dtype=dtype)
    draw(kept, TABLE, 0, "weight", shape, held, torch.device("cuda", 0))
    assert torch.equal(kept, part(shape, held, dtype=dtype))
