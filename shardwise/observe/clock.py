"""Where a step's time goes: its wall time, split into named spans.

The time of a span does not include the spans inside it. Waits for communication (`exposed_communication`)
inside `forward_backward` are therefore counted once, under their own name. `total` minus all spans is the
time that belongs to no span.

On a GPU the host only queues work, so a host clock would measure the queueing. There a span is a pair of CUDA
events on the current stream. Two events around "let this stream wait for the communication stream" measure
exactly the time for which the computation was blocked: communication hidden behind computation is not
counted. Events are read only in `finish`, once per step, and are reused, so a span costs two event records (a
few microseconds of host time) and never a synchronisation. `data` is host time everywhere, because fetching a
batch is host work. On a GPU it may overlap with queued device work, so it is not subtracted from a span
around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardwise.observe.intervals import Interval
from shardwise.observe.spans import EXPOSED, SPANS, Span

if TYPE_CHECKING:
    import torch

_HOST_SPANS = frozenset({"data"})

_EPOCH = time() - monotonic()
"""Zero of the monotonic clock in seconds since the epoch. It is set when this module is imported, and so
before workers are forked.
"""


def present_time() -> float:
    """Return the seconds since the epoch, for records.

    The time advances with the monotonic clock: if the wall clock is set forward or back during a run, no
    duration becomes negative or too long. All processes of a run on one machine agree on it.
    """
    return _EPOCH + monotonic()


class _Timer(Protocol):
    """A clock that marks times and later returns the seconds between two marks."""

    def mark(self) -> Any:
        """Return a mark of the present time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. The marks may not be usable afterwards."""


class _HostTimer:
    def mark(self) -> float:
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _CudaTimer:
    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # returns at once if the caller has synchronised the device, as it should
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
class SpanPart:
    """An uninterrupted part of a span, in times of `perf_counter`. It ends where another span begins
    inside.
    """

    name: str
    start: float
    end: float


class StepClock:
    """Splits each step into spans. One clock serves one step at a time, from all threads of that step.

    Spans may be nested across threads: backward hooks run on autograd's thread while the thread that opened
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
        self._stretches: list[SpanPart] = []
        self._since = self._began
        self.finished: list[SpanPart] = []
        """Parts of spans of the last finished step; empty on a GPU."""

    @contextmanager
    def span(self, name: Span) -> Iterator[None]:
        """Time the body of a `with` block under this name. It may be entered many times per step."""
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

    def add(self, name: Span, start: float, end: float) -> None:
        """Add host time that was measured elsewhere with `perf_counter`.

        It counts as spent inside the span that is open now, if there is one.
        """
        self._closed.append(_TimedSpan(name, self._open[-1] if self._open else None, start, end))
        self._end_stretch(start)
        self._stretches.append(SpanPart(name, start, end))
        self._since = end

    def waits(self) -> list[Interval]:
        """Return the intervals for which the last finished step was blocked by communication."""
        return [(part.start, part.end) for part in self.finished if part.name == EXPOSED]

    def finish(self) -> dict[str, float]:
        """Return the seconds of each span since the last `finish`, and the wall time between them as `total`.

        Call it after the device was synchronised (reading the loss does that); otherwise it waits for the
        device.
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
        """Discard the measurements and begin a step now.

        Use it after an evaluation or a save, whose time does not belong to a step.
        """
        self.finish()

    def _timer(self, name: str) -> _Timer:
        return self._host if name in _HOST_SPANS else self._device

    def _credit(self, name: str, parent: str | None, seconds: float) -> None:
        self._added[name] = self._added.get(name, 0.0) + seconds
        if parent is not None and self._timer(parent) is self._timer(name):
            self._added[parent] = self._added.get(parent, 0.0) - seconds

    def _end_stretch(self, now: Any) -> None:
        """End the uninterrupted part of the open span. On a GPU marks are events, and parts are not
        recorded.
        """
        if self._on_host:
            if self._open and now > self._since:
                self._stretches.append(SpanPart(self._open[-1], self._since, now))
            self._since = now

    def _reset(self, now: float) -> None:
        self.finished, self._stretches = self._stretches, []
        self._closed.clear()
        self._added.clear()
        self._began = now
