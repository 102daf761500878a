"""The judgement of a parameter server, in every order of events that Hypothesis can think of."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.asynchronous.portions import Portions, State

WORKERS = ["a", "b", "c", "d", "e"]


class Play:
    """Workers that ask, bring and are lost in a seeded order, until all updates are made."""

    def __init__(self, work: Portions, seed: int, losses: float = 0.0, workers: int = 5) -> None:
        self.work, self.chance, self.losses = work, random.Random(seed), losses
        self.tasks: dict[str, int | None] = dict.fromkeys(WORKERS[:workers])
        self.used: list[int] = []
        self.staleness: list[int] = []

    def run(self, updates: int | None = None) -> None:
        target = self.work.updates if updates is None else updates
        while self.work.version < target:
            before, events = self.work.version, 0
            while self.work.version == before:
                self._event()
                events += 1
                assert events < 10_000, "nobody gets on"

    def _event(self) -> None:
        worker = self.chance.choice(list(self.tasks))
        portion = self.tasks[worker]
        if self.chance.random() < self.losses:
            self.work.release(worker)
            self.tasks[worker] = None
        elif portion is None:
            self.tasks[worker] = self.work.ask(worker)
        else:
            self.work.bring(worker, portion)
            self.tasks[worker] = None
        while (
            due := self.work.due()
        ) is not None:  # after a loss too: what is missing again holds nothing up
            self.staleness += self.work.staleness(due)
            self.used += [one.portion for one in due]
            self.work.update(due)


@given(
    st.integers(1, 6),
    st.sampled_from([0, 1, 2, 4, 16, None]),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 2**32),
)
def test_every_portion_is_used_once_and_none_is_too_stale(
    portions: int, bound: int | None, backups: bool, workers: int, losses: float, seed: int
) -> None:
    work = Portions(portions, 8, bound, backups)
    play = Play(work, seed, losses, workers)
    play.run()
    assert sorted(play.used) == list(range(8 * portions))
    assert min(play.staleness) >= 0
    assert bound is None or max(play.staleness) <= bound
    assert work.ended
    assert work.state() == State(8, 8 * portions)
    assert all(work.ask(worker) is None for worker in WORKERS)


@given(st.integers(1, 4), st.sampled_from([0, 2, None]), st.integers(0, 2**32), st.integers(0, 7))
def test_begun_anew_from_what_was_kept_nothing_is_used_twice_or_never(
    portions: int, bound: int | None, seed: int, version: int
) -> None:
    first = Play(Portions(portions, 8, bound), seed)
    first.run(version)
    second = Play(Portions(portions, 8, bound, start=first.work.state()), seed + 1)
    second.run()
    assert sorted(first.used + second.used) == list(range(8 * portions))


def test_a_bound_of_nothing_is_synchronous() -> None:
    """Each update has the portions of its own batch, in the order of the data, however workers come and
    go."""
    play = Play(Portions(3, 10, 0), seed=1, losses=0.1)
    play.run()
    assert play.used == list(range(30))
    assert set(play.staleness) == {0}


def test_a_slow_worker_holds_the_others_up_just_before_it_is_too_stale() -> None:
    work = Portions(1, 100, 2)
    assert work.ask("slow") == 0
    for portion in (1, 2):
        assert work.ask("quick") == portion
        assert work.bring("quick", portion)
        due = work.due()
        assert due is not None
        work.update(due)
    assert work.ask("quick") == 3
    assert work.bring("quick", 3)
    assert work.due() is None, "the third update would leave the slow one three behind"
    assert work.bring("slow", 0)
    due = work.due()
    assert due is not None
    assert work.staleness(due) == [2]
    assert [one.portion for one in due] == [0]


def test_an_idle_worker_computes_what_a_slow_one_has_not_brought_and_the_first_counts() -> None:
    work = Portions(2, 5, 0, backups=True)
    assert work.ask("slow") == 0
    assert work.ask("quick") == 1
    assert work.bring("quick", 1)
    assert work.ask("quick") == 0, "the slow one's portion again"
    assert work.ask("third") == 0
    assert work.bring("quick", 0)
    due = work.due()
    assert due is not None
    assert [(one.portion, one.worker) for one in due] == [(0, "quick"), (1, "quick")]
    work.update(due)
    assert not work.bring("slow", 0)
    assert not work.bring("third", 0)
    assert work.dropped == 2


def test_without_copies_a_worker_waits_and_a_stranger_brings_nothing() -> None:
    work = Portions(1, 5, 0)
    assert work.ask("one") == 0
    assert work.ask("two") is None
    assert not work.bring("two", 0)
    assert not work.bring("one", 7)
    assert work.bring("one", 0)
    assert not work.bring("one", 0)


@pytest.mark.parametrize("bound", [0, 3, None])
def test_no_more_is_handed_out_than_the_last_update_needs(bound: int | None) -> None:
    work = Portions(2, 1, bound)
    assert [work.ask(worker) for worker in WORKERS] == [0, 1, None, None, None]


def test_what_slow_servers_have_not_used_yet_does_not_pile_up() -> None:
    """Four portions are brought in the time of each update, of two: none is older than an update, however
    long it goes on."""
    work, staleness = Portions(portions=2, updates=100, max_staleness=None), list[int]()
    while not work.ended:
        for worker in WORKERS[:4]:
            portion = work.ask(worker)
            if portion is not None:
                work.bring(worker, portion)
        due = work.due()
        assert due is not None
        staleness += work.staleness(due)
        work.update(due)
    assert max(staleness) == 1
