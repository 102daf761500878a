"""Where a step's time goes: its wall time split into named spans.

A span's time is its own time only: what a span inside it takes is subtracted, so the waits for communication
(`exposed_communication`) that happen in the middle of `forward_backward` are counted once, under their own
name. The rest, `total` minus the spans, is what nobody claimed.

On a GPU the host only queues work, so a host clock would measure the queueing. There a span is a pair of CUDA
events on the current stream, and an event pair around "make this stream wait for the communication stream" is
exactly the time the computation stood still: communication hidden behind computation costs nothing and is not
counted. Events are read back only in `finish`, once a step, and are used again, so a span costs two event
records (a few microseconds of host time) and never a synchronisation. `data` is host time everywhere:
fetching a batch is host work. On a GPU it may overlap with device work that is still queued, so it is not
subtracted from a span around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter, time
from typing import Any, Literal, Protocol

from shardwise.observe.intervals import Interval

SPANS = ("data", "forward_backward", "exposed_communication", "optimizer")
"""The spans every step has, in the order they are shown."""

_HOST_SPANS = frozenset({"data"})

_EPOCH = time() - monotonic()
"""Of the monotonic clock, in seconds since the epoch; set when this module is imported, and so before workers
are forked."""


def present_time() -> float:
    """Seconds since the epoch, for records. It advances with the monotonic clock: a wall clock that is set
    forward or back while a run lasts makes none of its times negative or too long. All processes of a machine
    that belong to a run agree on it.
    """
    return _EPOCH + monotonic()


class _Timer(Protocol):
    """A clock: marks the present time, and tells later how far apart two marks are."""

    def mark(self) -> Any:
        """The present time."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to the other; may use the marks up."""


class _HostTimer:
    def mark(self) -> float:
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _CudaTimer:
    def __init__(self) -> None:
        self._free: list[Any] = []

    def mark(self) -> Any:
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()  # returns at once when the caller has synchronised, as it should have
        elapsed = float(start.elapsed_time(end)) / 1e3
        self._free += (start, end)
        return elapsed


@dataclass(frozen=True)
class _TimedSpan:
    name: str
    parent: str | None
    start: Any
    end: Any


@dataclass(frozen=True)
class Stretch:
    """A span's own time without a break, from `perf_counter` to `perf_counter`: where another begins inside
    it, it ends."""

    name: str
    start: float
    end: float


class StepClock:
    """Splits each step into spans. One clock serves one step at a time, from whichever threads that step runs
    on.

    Spans nest across threads on purpose: backward hooks run on autograd's thread while the thread that opened
    `forward_backward` waits for it.
    """

    def __init__(self, device_type: Literal["cpu", "cuda"]) -> None:
        self._host: _Timer = _HostTimer()
        self._device: _Timer = _CudaTimer() if device_type == "cuda" else self._host
        self._open: list[str] = []
        self._closed: list[_TimedSpan] = []
        self._added: dict[str, float] = {}
        self._began = perf_counter()
        self._on_host = self._device is self._host
        self._stretches: list[Stretch] = []
        self._since = self._began
        self.finished: list[Stretch] = []
        """The step that was finished last, span by span; none on a GPU."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under this name. May be entered many times a step."""
        timer = self._timer(name)
        parent, start = self._open[-1] if self._open else None, timer.mark()
        self._end_stretch(start)
        self._open.append(name)
        try:
            yield
        finally:
            end = timer.mark()
            self._closed.append(_TimedSpan(name, parent, start, end))
            self._end_stretch(end)
            self._open.pop()

    def add(self, name: str, start: float, end: float) -> None:
        """Host time measured elsewhere, by `perf_counter`; it counts as spent inside the span that is open
        now, if one is."""
        self._closed.append(_TimedSpan(name, self._open[-1] if self._open else None, start, end))
        self._end_stretch(start)
        self._stretches.append(Stretch(name, start, end))
        self._since = end

    def waits(self) -> list[Interval]:
        """When the step that was finished last stood still for communication."""
        return [(part.start, part.end) for part in self.finished if part.name == "exposed_communication"]

    def finish(self) -> dict[str, float]:
        """Seconds of each span since the last `finish`, and the wall time between them as `total`.

        Call it after the device has been synchronised (reading the loss does that), or it waits for the
        device itself.
        """
        assert not self._open, f"finish() inside the span {self._open[-1]!r}"
        for span in self._closed:
            self._credit(span.name, span.parent, self._timer(span.name).seconds(span.start, span.end))
        split = {name: max(0.0, self._added.get(name, 0.0)) for name in dict.fromkeys((*SPANS, *self._added))}
        now = perf_counter()
        split["total"] = now - self._began
        self._reset(now)
        return split

    def restart(self) -> None:
        """Forget what was measured and begin a step now: after an evaluation or a save, whose time is not a
        step's."""
        self.finish()

    def _timer(self, name: str) -> _Timer:
        return self._host if name in _HOST_SPANS else self._device

    def _credit(self, name: str, parent: str | None, seconds: float) -> None:
        self._added[name] = self._added.get(name, 0.0) + seconds
        if parent is not None and self._timer(parent) is self._timer(name):
            self._added[parent] = self._added.get(parent, 0.0) - seconds

    def _end_stretch(self, now: Any) -> None:
        """Time that passes from now on is another span's. On a GPU marks are events, and stretches are not
        kept."""
        if self._on_host:
            if self._open and now > self._since:
                self._stretches.append(Stretch(self._open[-1], self._since, now))
            self._since = now

    def _reset(self, now: float) -> None:
        self.finished, self._stretches = self._stretches, []
        self._closed.clear()
        self._added.clear()
        self._began = now
