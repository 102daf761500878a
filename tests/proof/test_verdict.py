"""What counts as an error, and what fails without any number being off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardwise.proof.rank_reports import Key, RankReport, Reference, SliceComparison
from shardwise.proof.verdict import Verdict, judge

SHAPE = (4, 2)
SQUARE = 8.0
"""Of a parameter of ones."""


def piece(key: Key, rows: tuple[int, int], off: float = 0.0) -> SliceComparison:
    """Rows of a parameter of ones, each element off by so much."""
    elements = 2 * (rows[1] - rows[0])
    return SliceComparison(
        key,
        (rows, (0, 2)),
        elements * off**2,
        float(elements),
        elements * (1 + off) ** 2,
        elements * (1 + off),
    )


def report(
    rank: int, rows: tuple[int, int], off: float = 0.0, names: tuple[str, ...] = ("a", "b")
) -> RankReport:
    quantities = [(name, quantity, 1) for name in names for quantity in ("gradient", "weight")]
    numbers = [
        SliceComparison(("", quantity, 1), (), 0.0, 4.0, 4.0, 4.0) for quantity in ("loss", "gradient norm")
    ]
    return RankReport(rank, {}, [*(piece(key, rows, off) for key in quantities), *numbers], [2.0], [], {})


def truth(**squares: float) -> Reference:
    keys = {(name, quantity, 1): SQUARE for name in ("a", "b") for quantity in ("gradient", "weight")}
    keys |= {(name, "gradient", 1): square for name, square in squares.items()}
    return Reference(
        [2.0],
        [2.0],
        {"a": SHAPE, "b": SHAPE},
        {},
        {**keys, ("", "loss", 1): 4.0, ("", "gradient norm", 1): 4.0},
        0.01,
    )


def worst(verdict: Verdict) -> float:
    return verdict.errors[0].relative_error


def test_slices_are_put_together() -> None:
    verdict = judge([report(0, (0, 2), off=3e-3), report(1, (2, 4), off=4e-3)], truth(), None, "float64")
    assert worst(verdict) == pytest.approx(math.sqrt(4 * 9e-6 + 4 * 16e-6) / math.sqrt(8))
    assert verdict.errors[0].ranks == (0, 1)


def test_the_worst_of_several_copies_counts() -> None:
    verdict = judge(
        [report(0, (0, 4)), report(1, (0, 4), off=1e-3), report(2, (0, 4), off=1e-12)],
        truth(),
        None,
        "float64",
    )
    assert worst(verdict) == pytest.approx(1e-3)
    assert verdict.errors[0].ranks == (1,)
    assert not verdict.passes


def test_elements_that_nobody_holds_fail() -> None:
    verdict = judge([report(0, (0, 2)), report(1, (3, 4))], truth(), None, "float64")
    assert verdict.faults == tuple(
        f"{name}: 2 of its elements are not held by any rank" for name in ("a", "b")
    )
    assert not verdict.passes


def test_a_parameter_that_nobody_holds_fails() -> None:
    verdict = judge([report(0, (0, 4), names=("a",))], truth(), None, "float64")
    assert verdict.faults == ("b is not held by any rank",)


def test_a_parameter_without_gradient_fails() -> None:
    verdict = judge([report(0, (0, 4)), replace(report(1, (0, 4)), missing=["b"])], truth(), None, "float64")
    assert verdict.faults == ("b has no gradient on ranks 1",)


def test_nan_fails() -> None:
    assert not judge([report(0, (0, 4), off=math.nan)], truth(), None, "float64").passes


def test_a_real_error_in_a_small_gradient_is_not_hidden() -> None:
    """The gradient of b is 1e-10 of an average one, and off by as much as itself."""
    small = 1e-10
    keys = [("a", "gradient", 1), ("a", "weight", 1), ("b", "weight", 1)]
    slices = [piece(key, (0, 4)) for key in keys]  # type: ignore[arg-type]
    slices.append(
        SliceComparison(
            ("b", "gradient", 1), ((0, 4), (0, 2)), SQUARE * small**2, SQUARE * small**2, 0.0, 0.0
        )
    )
    slices += report(0, (0, 4)).slices[-2:]
    verdict = judge([RankReport(0, {}, slices, [2.0], [], {})], truth(b=SQUARE * small**2), None, "float64")
    assert [error.parameter for error in verdict.failing("gradient")] == ["b"]


def test_a_short_dtype_is_limited_by_eight_times_what_one_device_loses() -> None:
    one_device = report(0, (0, 4), off=1e-2)
    assert judge([report(0, (0, 4), off=7e-2)], truth(), one_device, "bfloat16").passes
    assert not judge([report(0, (0, 4), off=9e-2)], truth(), one_device, "bfloat16").passes
