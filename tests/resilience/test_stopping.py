"""How a process collects the signals that ask it to stop."""

from __future__ import annotations

import os
import signal

import pytest

from shardwise.cli.signals import stopped_as_interrupted
from shardwise.resilience import stopping
from shardwise.resilience.stopping import INTERRUPTED, RESUME_ME, STOP_SIGNALS, CollectSignals

pytestmark = pytest.mark.usefixtures("signals_as_before")


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_however_often_it_comes_is_one_request(number: int) -> None:
    with CollectSignals() as signals:
        assert signals.status is None
        send(number, number, number)
        assert signals.status == (INTERRUPTED if number == signal.SIGINT else RESUME_ME)
    send(*STOP_SIGNALS)  # too late to change anything


def test_ctrl_c_once_more_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST_SECONDS", 0.0)
    with CollectSignals() as signals, pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    assert signals.received == [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_dropped_still_stops_the_run_and_prints_nothing() -> None:
    class Hook:
        """An object whose end runs code in which Python drops exceptions, as it does in hooks of os.fork."""

        def __del__(self) -> None:
            send(signal.SIGTERM)

    with stopped_as_interrupted():
        hook = Hook()
        del hook
        with CollectSignals() as signals:
            assert signals.status == RESUME_ME


def test_a_terminal_that_closes_does_not_stop_what_nohup_started() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with CollectSignals() as signals:
        send(signal.SIGHUP)
    assert not signals.received
