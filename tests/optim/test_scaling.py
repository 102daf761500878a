from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim import LossScale

HISTORY = st.lists(st.booleans(), max_size=60)


def scales(start: LossScale, overflows: list[bool]) -> list[LossScale]:
    found = [start]
    for overflowed in overflows:
        found.append(found[-1].after(overflowed))
    return found


@given(overflows=HISTORY, every=st.integers(1, 7))
def test_the_scale_halves_at_each_overflow_and_doubles_after_each_run_of_clean_steps(
    overflows: list[bool], every: int
) -> None:
    """Counted over the whole history at once: runs of clean steps between overflows, each worth whole
    doublings."""
    words = "".join("x" if overflowed else "." for overflowed in overflows).split("x")
    doublings = sum(len(word) // every for word in words)
    last = scales(LossScale(2.0**20, every), overflows)[-1]
    assert last.value == 2.0 ** (20 + doublings - (len(words) - 1))
    assert last.clean_steps == len(words[-1]) % every


@given(overflows=HISTORY, every=st.integers(1, 7), cut=st.integers(0, 60))
def test_a_scale_is_all_there_is_to_resume_from(overflows: list[bool], every: int, cut: int) -> None:
    whole = scales(LossScale(1024.0, every), overflows)[-1]
    half = scales(LossScale(1024.0, every), overflows[:cut])[-1]
    resumed = LossScale(value=half.value, grow_every=every, clean_steps=half.clean_steps)
    assert scales(resumed, overflows[cut:])[-1] == whole


@given(overflows=HISTORY)
def test_a_power_of_two_stays_one_so_that_scaling_is_exact(overflows: list[bool]) -> None:
    assert all(
        one.value.hex().startswith("0x1.0000000000000p") for one in scales(LossScale(65536.0, 2), overflows)
    )


@given(overflows=HISTORY)
def test_only_float16_has_a_scale_that_moves(overflows: list[bool]) -> None:
    for precision in ("float64", "float32", "bfloat16"):
        start = LossScale.first(precision, 65536.0, 2000)
        assert {one.value for one in scales(start, overflows)} == {1.0}


def test_float16_starts_as_configured() -> None:
    assert LossScale.first("float16", 512.0, 7) == LossScale(512.0, 7)
