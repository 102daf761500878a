"""The simulated bubbles and activations are the published ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.schedules import SCHEDULES
from shardwise.plans import Timeline, make_schedule, peak_in_flight, simulate

SIZES = [(1, 3), (2, 2), (2, 7), (4, 4), (4, 8), (4, 9), (8, 8), (8, 24), (7, 23)]
COSTS = [(1, 1, 1), (2, 2, 1), (2, 3, 2), (4, 5, 3), (3, 3, 2)]
"""Times of F, I and W."""


def waiting(timeline: Timeline) -> float:
    """Time that each rank waits, the same for all because all have the same work."""
    (work,) = set(timeline.busy)
    return timeline.makespan - work


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (8, 3)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_wait_p_minus_1_micro_batches(name: str, p: int, m: int) -> None:
    """Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2: (p-1)/m of the busy time."""
    timeline = simulate(make_schedule(name, p, m))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert timeline.idle == pytest.approx([timeline.bubble] * p)
    for forward, inputs, weights in COSTS:
        costed = simulate(make_schedule(name, p, m), forward, inputs, weights)
        assert waiting(costed) == (p - 1) * (forward + inputs + weights)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(p: int, m: int, v: int) -> None:
    """Narayanan et al. 2021 (Megatron-LM), section 2.2: 1/v (p-1)/m of the busy time; here also where p does
    not divide m."""
    timeline = simulate(make_schedule("interleaved", p, m, v))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)
    (work,) = set(timeline.busy)
    assert waiting(timeline) / work == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "inputs", "weights"), COSTS)
def test_zb1p_waits_as_zb_h1_does(p: int, m: int, forward: int, inputs: int, weights: int) -> None:
    """Qi et al. 2023 (Zero Bubble Pipeline Parallelism), table 2: (p-1)(T_F + T_B - T_W), T_B being our I."""
    timeline = simulate(make_schedule("zb1p", p, m), forward, inputs, weights)
    assert waiting(timeline) == (p - 1) * (forward + inputs - weights)


@pytest.mark.parametrize(
    ("p", "m"), [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in (2 * p, 2 * p + 1, 3 * p, 5 * p + 2)]
)
def test_zbv_has_no_gap_on_any_rank_when_all_halves_take_the_same_time(p: int, m: int) -> None:
    """Qi et al. 2023, section 6, and Qi et al. 2024 (Controllable Memory), table of V-ZB: no bubble between a
    rank's first and last action if T_F = T_B = T_W. Over all ranks that leaves (p-1) T_F, the time in which
    the last rank gets its first input, which no schedule of this placement can avoid."""
    timeline = simulate(make_schedule("zbv", p, m))
    assert timeline.gaps == (0.0,) * p
    assert timeline.makespan == 6 * m + p - 1


@pytest.mark.parametrize(
    ("p", "m"), [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in (2 * p, 2 * p + 1, 3 * p, 5 * p + 2)]
)
@pytest.mark.parametrize(("forward", "inputs", "weights"), COSTS)
def test_dualpipev_waits_no_longer_than_published(
    p: int, m: int, forward: int, inputs: int, weights: int
) -> None:
    """DeepSeek's DualPipe, table of bubbles: (PP/2-1)(F&B + B - 3W) with PP = 2p stages and B the whole
    backward. A pair that merely follows each other takes F&B = F + B; it may begin before both inputs are
    there, so we can only be faster."""
    waited = waiting(simulate(make_schedule("dualpipev", p, m), forward, inputs, weights))
    backward = inputs + weights
    assert (p - 1) * forward <= waited <= (p - 1) * ((forward + backward) + backward - 3 * weights)
    if forward == inputs == weights:  # the lower bound is met
        assert waited == (p - 1) * forward


@settings(max_examples=100)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 3),
    st.sampled_from(COSTS),
)
def test_no_schedule_beats_the_bounds_of_the_pipeline(
    name: str, p: int, m: int, v: int, costs: tuple[int, int, int]
) -> None:
    """The last rank cannot start before p-1 forwards; one micro-batch cannot be quicker than its own chain;
    and nothing takes longer than doing all the work one after the other."""
    schedule = make_schedule(name, p, m, v if name == "interleaved" else None)
    forward, inputs, _ = costs
    timeline = simulate(schedule, *costs)
    (work,) = set(timeline.busy)
    assert work == m * (schedule.stages // p) * sum(costs)
    assert timeline.makespan >= max(work + (p - 1) * forward, schedule.stages * (forward + inputs))
    assert timeline.makespan <= p * work


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (8, 3)])
def test_1f1b_keeps_p_minus_rank_activations_and_gpipe_all(p: int, m: int) -> None:
    assert peak_in_flight(make_schedule("1f1b", p, m)) == tuple(min(m, p - rank) for rank in range(p))
    assert peak_in_flight(make_schedule("gpipe", p, m)) == (m,) * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_others_keep_what_their_papers_say(p: int) -> None:
    """ZB-H1: as 1F1B's first rank (Qi et al. 2023). V-ZB: p micro-batches of a rank's two stages (Qi et al.
    2024). DualPipeV: PP + 1 with PP = 2p (DeepSeek). Interleaved: Megatron's warm-up and one more."""
    m, v = 4 * p, 3
    assert max(peak_in_flight(make_schedule("zb1p", p, m))) == p
    assert max(peak_in_flight(make_schedule("zbv", p, m))) == 2 * p
    assert max(peak_in_flight(make_schedule("dualpipev", p, m))) == 2 * p + 1
    if p > 1:
        interleaved = tuple(2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p))
        assert peak_in_flight(make_schedule("interleaved", p, m, v)) == interleaved


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv"])
def test_activations_stay_flat_as_micro_batches_grow(name: str) -> None:
    assert peak_in_flight(make_schedule(name, 4, 8)) == peak_in_flight(make_schedule(name, 4, 32))


def test_times_of_a_small_pipeline_by_hand() -> None:
    """Two ranks, one micro-batch, forward 2 and 3, backward twice that, a message 1: 0-2, 3-6, 6-12,
    13-17."""
    timeline = simulate(make_schedule("1f1b", 2, 1), [2, 3], [2, 3], [2, 3], send=1)
    assert [[(span.start, span.end) for span in row] for row in timeline.spans] == [
        [(0, 2), (13, 17)],
        [(3, 6), (6, 12)],
    ]
    assert timeline.makespan == 17
    assert timeline.busy == (6, 9)
    assert timeline.gaps == (11, 0)
    assert timeline.idle == pytest.approx((11 / 17, 8 / 17))
    assert timeline.bubble == pytest.approx(1 - 15 / 34)


def test_a_message_inside_a_rank_costs_nothing() -> None:
    one_rank = make_schedule("zbv", 1, 4)
    assert simulate(one_rank, send=5).makespan == simulate(one_rank).makespan == 24
