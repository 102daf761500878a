"""Budgets are those of the papers' tables, and the closed form is where a search finds the minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import PRESETS, Model
from shardwise.config.parameters import count
from shardwise.errors import UserError
from shardwise.search.budget import (
    BESIROGLU,
    HOFFMANN,
    Law,
    chinchilla,
    compute_of,
    cost,
    flops_for,
    loss,
    of_a_size,
    optimum,
    shape_for,
)

GOPHER = 5.76e23
CHINCHILLA_TABLE_3 = [  # parameters, FLOPs, tokens
    (400e6, 1.92e19, 8.0e9),
    (1e9, 1.21e20, 20.2e9),
    (10e9, 1.23e22, 205.1e9),
    (67e9, 5.76e23, 1.5e12),
    (175e9, 3.85e24, 3.7e12),
    (280e9, 9.90e24, 5.9e12),
    (520e9, 3.43e25, 11.0e12),
    (1e12, 1.27e26, 21.2e12),
    (10e12, 1.30e28, 216.2e12),
]
budgets = st.floats(17, 30).map(lambda power: 10.0**power)
laws = st.sampled_from([HOFFMANN, BESIROGLU])


@pytest.mark.parametrize(("parameters", "flops", "tokens"), CHINCHILLA_TABLE_3)
def test_a_budget_buys_what_chinchillas_table_says(parameters: float, flops: float, tokens: float) -> None:
    best = chinchilla(flops)
    assert best.parameters == pytest.approx(parameters, rel=0.05)
    assert best.tokens == pytest.approx(
        tokens, rel=0.08
    )  # their D/N drifts from 20.0 to 22.4, the most at 67B by rounding to 1.5T
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)


@pytest.mark.parametrize(("parameters", "flops", "tokens"), CHINCHILLA_TABLE_3)
def test_a_model_of_the_tables_size_gets_the_tables_tokens(
    parameters: float, flops: float, tokens: float
) -> None:
    spent = of_a_size(parameters, flops)
    assert spent.tokens == pytest.approx(tokens, rel=0.05)
    assert (
        spent.useful > 0.95
    )  # the paper's optima are between 20 and 23 tokens a parameter, where the minimum is flat


def test_chinchillas_loss_by_hand() -> None:
    small, short = 406.4 / (70e9) ** 0.34, 410.7 / (1.4e12) ** 0.28
    assert loss(HOFFMANN, 70e9, 1.4e12) == pytest.approx(1.69 + small + short)
    assert loss(HOFFMANN, 70e9, 1.4e12) == pytest.approx(1.937, abs=5e-4)
    assert chinchilla(GOPHER).loss == pytest.approx(1.937, abs=1e-3)


def test_the_paper_beats_gopher_with_the_same_compute() -> None:
    """Gopher is 280B on 300B tokens: 1.69 + 0.052 + 0.251, term by term."""
    gopher = of_a_size(280e9, 6 * 280e9 * 300e9)
    assert gopher.loss == pytest.approx(1.993, abs=1e-3)
    assert gopher.loss > chinchilla(GOPHER).loss
    assert 0.4 < gopher.useful < 0.7


def test_the_published_constants_want_more_tokens_than_their_paper_and_the_replication_agrees_with_it() -> (
    None
):
    best = chinchilla(GOPHER)
    assert best.fitted.tokens / best.fitted.parameters == pytest.approx(92.6, abs=0.1)
    assert best.replicated.tokens / best.replicated.parameters == pytest.approx(18.4, abs=0.1)
    assert best.replicated.parameters == pytest.approx(70e9, rel=0.05)  # Chinchilla as it was trained


def test_the_powers_of_the_optimum_are_those_of_the_papers() -> None:
    """N grows with C^(β/(α+β)): 0.45 by the constants printed, 0.51 by the replication."""
    for law, power in ((HOFFMANN, 0.4516), (BESIROGLU, 0.5126)):
        found = math.log(optimum(law, 1e25).parameters / optimum(law, 1e21).parameters) / math.log(1e4)
        assert found == pytest.approx(power, abs=1e-4)


@given(laws, budgets)
def test_a_search_finds_the_minimum_of_the_closed_form(law: Law, flops: float) -> None:
    best = optimum(law, flops)
    parameters = np.geomspace(1e-4 * best.parameters, 1e4 * best.parameters, 20_001)
    tokens = flops / 6 / parameters
    losses = (
        law.floor
        + law.parameters * parameters**-law.parameters_power
        + law.tokens * tokens**-law.tokens_power
    )
    found = int(np.argmin(losses))
    assert parameters[found] == pytest.approx(best.parameters, rel=1e-3)
    assert losses[found] == pytest.approx(best.loss, rel=1e-9)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)


@given(budgets, st.floats(1, 1000))
def test_more_compute_never_raises_the_loss_nor_shrinks_the_model(flops: float, more: float) -> None:
    less, best = chinchilla(flops), chinchilla(flops * more)
    assert best.loss <= less.loss
    assert best.parameters >= less.parameters
    assert best.tokens >= less.tokens
    assert best.fitted.loss <= less.fitted.loss
    assert best.replicated.loss <= less.replicated.loss


@given(budgets)
def test_no_allocation_is_better_than_the_laws_own(flops: float) -> None:
    best = chinchilla(flops)
    assert best.fitted.loss <= best.loss * (1 + 1e-12)
    assert best.replicated.loss <= loss(BESIROGLU, best.parameters, best.tokens) * (1 + 1e-12)


@given(laws, budgets)
def test_the_compute_for_a_loss_is_the_compute_that_gives_it(law: Law, flops: float) -> None:
    assert flops_for(law, optimum(law, flops).loss) == pytest.approx(flops, rel=1e-6)


def test_no_compute_reaches_the_floor() -> None:
    assert flops_for(HOFFMANN, 1.69) == math.inf


@given(budgets, st.floats(0.01, 100))
def test_a_settled_size_spends_the_budget_at_most_as_well_as_the_best(flops: float, factor: float) -> None:
    best = optimum(BESIROGLU, flops)
    spent = of_a_size(best.parameters * factor, flops)
    farther = of_a_size(best.parameters * factor**2, flops)
    assert 6 * spent.parameters * spent.tokens == pytest.approx(flops)
    assert 0 < farther.useful <= spent.useful * (1 + 1e-9) <= 1 + 1e-9
    assert of_a_size(best.parameters, flops).useful == pytest.approx(1)


def test_the_minimum_is_as_flat_as_the_docstring_says() -> None:
    for ratio, wasted in ((10, 0.03), (40, 0.05)):
        assert 1 - of_a_size(math.sqrt(GOPHER / 6 / ratio), GOPHER).useful == pytest.approx(wasted, abs=0.005)


# -- time, energy, money -------------------------------------------------------------------------------------


def test_a_bill_by_hand() -> None:
    """36e18 FLOPs at 1e15 a second on ten devices: an hour on ten; 700 W each, 1.5 for the node and 1.2 for
    the building."""
    bill = cost(36e18, 1e15, devices=10, watts=700.0, price=2.5)
    assert bill.seconds == pytest.approx(3600)
    assert bill.device_hours == pytest.approx(10)
    assert bill.kwh == pytest.approx(12.6)
    assert bill.money == pytest.approx(25)
    assert cost(36e18, 1e15, devices=10).kwh is None
    assert cost(36e18, 1e15, devices=10).money is None


def test_device_hours_of_llama_3_are_what_its_model_card_says() -> None:
    """30.84 million H100 hours for 405B, at 380 to 430 TFLOP/s (Llama 3.1 model card; Llama Team 2024, table
    4)."""
    fast, slow = (cost(3.8e25, speed, devices=16_384).device_hours for speed in (430e12, 380e12))
    assert fast < 30.84e6  # without restarts and the smaller first stage
    assert slow == pytest.approx(30.84e6, rel=0.15)


@given(st.floats(0.01, 1000), st.integers(1, 100_000), st.floats(1e9, 1e16))
def test_days_of_compute_take_as_many_days(days: float, devices: int, speed: float) -> None:
    assert cost(compute_of(days, devices, speed), speed, devices).seconds == pytest.approx(days * 86400)


# -- shapes --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.floats(8, 12).map(lambda power: 10.0**power), st.sampled_from([257, 32_000, 50_257, 128_256, 151_936])
)
def test_a_shape_has_about_the_parameters_wished_for_and_divides_well(
    parameters: float, vocabulary: int
) -> None:
    shape = shape_for(parameters, vocabulary)
    assert count(Model(**shape)) == pytest.approx(parameters, rel=0.05)
    assert shape["vocabulary"] == vocabulary
    assert shape["kv_heads"] == 8
    assert [shape[key] % 8 for key in ("heads", "hidden", "ffn")] == [0, 0, 0]
    assert shape["hidden"] % 256 == shape["ffn"] % 256 == shape["layers"] % 2 == 0
    assert 3.25 <= shape["ffn"] / shape["hidden"] <= 4
    assert shape["head_dim"] == (64 if parameters < 1.5e9 else 128)


@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b"])
def test_the_shape_for_llamas_count_is_llamas(preset: str) -> None:
    known = Model(**PRESETS[preset])
    shape = shape_for(count(known), known.vocabulary)
    assert shape == {key: getattr(known, key) for key in shape}


def test_a_budget_too_small_for_the_vocabulary_says_so() -> None:
    with pytest.raises(
        UserError, match=r"vocabulary of 128,256: the nearest has .*; give another model.vocabulary"
    ):
        shape_for(3e6, 128_256)
    with pytest.raises(UserError, match="no usual shape"):
        shape_for(1e18, 128_256)
