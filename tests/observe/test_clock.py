import sys
import threading
import types

import pytest

from shardwise.observe import SPANS, StepClock, clock


class Time:
    """A clock that only moves when told, in place of the machine's."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = Time()
    monkeypatch.setattr(clock, "perf_counter", fake)
    return fake


@pytest.fixture
def gpu(monkeypatch):
    """A pretend device whose time is told apart from the host's, and which counts the events made."""
    state = types.SimpleNamespace(now=0.0, made=0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            state.made += 1
            self.at: float | None = None

        def record(self) -> None:
            self.at = state.now

        def synchronize(self) -> None:
            assert self.at is not None

        def elapsed_time(self, other: "Event") -> float:
            return (other.at - self.at) * 1000

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(Event=Event)))
    return state


def step(timed: StepClock, clock_hand, waits: int = 3) -> None:
    with timed.span("forward_backward"):
        clock_hand.now += 1.0
        for _ in range(waits):
            with timed.span("exposed_communication"):
                clock_hand.now += 0.25
            clock_hand.now += 0.5
    with timed.span("optimizer"):
        clock_hand.now += 0.125


def test_time_inside_a_nested_span_is_counted_once_and_the_spans_sum_to_the_total(time):
    timed = StepClock("cpu")
    with timed.span("data"):
        time.now += 0.0625
    step(timed, time)
    split = timed.finish()
    total = split.pop("total")
    assert split == {
        "data": 0.0625,
        "forward_backward": 2.5,
        "exposed_communication": 0.75,
        "optimizer": 0.125,
    }
    assert sum(split.values()) == total == 3.4375


def test_each_finish_starts_a_new_step_and_unused_spans_are_zero(time):
    timed = StepClock("cpu")
    step(timed, time)
    timed.finish()
    time.now += 2.0
    assert timed.finish() == {**dict.fromkeys(SPANS, 0.0), "total": 2.0}


def test_restart_forgets_what_was_measured(time):
    timed = StepClock("cpu")
    step(timed, time)
    timed.restart()
    time.now += 1.0
    assert timed.finish() == {**dict.fromkeys(SPANS, 0.0), "total": 1.0}


def test_added_seconds_are_taken_from_the_span_that_is_open(time):
    timed = StepClock("cpu")
    with timed.span("forward_backward"):
        time.now += 2.0
        timed.add("exposed_communication", time.now - 0.5, time.now)
    timed.add("optimizer", time.now, time.now + 0.25)
    split = timed.finish()
    assert (split["forward_backward"], split["exposed_communication"], split["optimizer"]) == (1.5, 0.5, 0.25)


def test_stretches_are_the_spans_own_times_in_order_and_waits_are_those_that_wait(time):
    timed = StepClock("cpu")
    began = time.now
    step(timed, time, waits=1)
    with timed.span("exposed_communication"):
        time.now += 1.0
        with timed.span("forward_backward"):
            time.now += 2.0
    split = timed.finish()
    edges = [began + passed for passed in (0.0, 1.0, 1.25, 1.75, 1.875, 2.875, 4.875)]
    names = ["forward_backward", "exposed_communication", "forward_backward", "optimizer"]
    names += ["exposed_communication", "forward_backward"]
    found = [(part.name, part.start, part.end) for part in timed.finished]
    assert found == list(zip(names, edges[:-1], edges[1:], strict=True))
    assert timed.waits() == [(edges[1], edges[2]), (edges[4], edges[5])]
    assert sum(end - start for start, end in timed.waits()) == split["exposed_communication"]


def test_a_span_opened_on_another_thread_nests_in_the_one_that_waits_for_it(time):
    timed = StepClock("cpu")

    def hook() -> None:
        with timed.span("exposed_communication"):
            time.now += 0.5

    with timed.span("forward_backward"):
        time.now += 1.0
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()
    split = timed.finish()
    assert (split["forward_backward"], split["exposed_communication"]) == (1.0, 0.5)


def test_a_span_is_closed_when_its_body_fails(time):
    timed = StepClock("cpu")

    def fail() -> None:
        with timed.span("forward_backward"):
            time.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert timed.finish()["forward_backward"] == 1.0


def test_on_cuda_spans_are_device_time_and_data_is_host_time(time, gpu):
    timed = StepClock("cuda")
    with timed.span("data"):
        time.now += 0.25
        gpu.now += 7.0
    step(timed, gpu)
    time.now += 1.0
    assert timed.finish() == {
        "data": 0.25,
        "forward_backward": 2.5,
        "exposed_communication": 0.75,
        "optimizer": 0.125,
        "total": 1.25,
    }


def test_on_cuda_events_are_used_again(time, gpu):
    timed = StepClock("cuda")
    step(timed, gpu)
    timed.finish()
    made = gpu.made
    for _ in range(5):
        step(timed, gpu)
        timed.finish()
    assert made == gpu.made == 2 * 5
