"""Lets a worker of a drill raise an exception on a signal, in the middle of its work.

The server that the workers are forked from imports this module (proof/drilled_train.py). Importing it
installs signal handlers, which the workers inherit. Nothing happens until the drill sends a signal
(`drill_faults.raise_error`). Then Python calls a function for every call in the main thread, which trains,
until the next call in the place that the signal stands for. There the exception is raised, so it passes
through torch and through our code as any other exception of that function would.

Python's profiling hook (`sys.setprofile`) is used because no function needs to be replaced. It costs time
only between the signal and the exception.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import torch.distributed as dist

from shardwise.checkpoint import save
from shardwise.proof.drill_faults import ERROR_SIGNALS, ErrorPlace

_TORCH, _SAVE = dist.distributed_c10d.__file__, save.__file__
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_to_all_single", "broadcast", "gather", "scatter", "barrier"),
    *("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
_FUNCTIONS: dict[ErrorPlace, set[tuple[str, str]]] = {
    "collective": {(_TORCH, name) for name in _COLLECTIVES},
    "group": {(_TORCH, "new_group")},
    "communicator": {(_TORCH, name) for name in _COLLECTIVES},
    "save": {(_SAVE, "take"), (_SAVE, "_run")},
}
"""File and name of the functions in which the exception of each place is raised."""
_MEETS = (_TORCH, "init_process_group")


class DrillError(Exception):
    """An exception that a drill has raised on purpose."""


class RaiseAt:
    """A profiling function that raises an exception in the next call of one of a place's functions.

    A communicator is created by the first collective of a new team. So for that place only collectives of
    the default group's backend count, and only after the team has met.
    """

    def __init__(self, place: ErrorPlace) -> None:
        self.place, self._functions = place, _FUNCTIONS[place]
        self._met = place != "communicator"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Look at one event of the thread. Python removes the function when it raises."""
        called = (frame.f_code.co_filename, frame.f_code.co_name)
        if event != "call":
            return
        if called == _MEETS:
            self._met = True
        elif self._met and called in self._functions and self._counts(frame):
            raise DrillError(f"raised by the drill in {called[1]} ({self.place})")

    def _counts(self, frame: FrameType) -> bool:
        """Return whether a collective is of the backend that creates communicators."""
        if self.place != "communicator":
            return True
        group = frame.f_locals.get("group")
        return group is None or dist.get_backend(group) == dist.get_backend()


def _raise_soon(number: int, _: FrameType | None) -> None:
    places = {signal_number: place for place, signal_number in ERROR_SIGNALS.items()}
    sys.setprofile(RaiseAt(places[number]))


for _number in ERROR_SIGNALS.values():
    signal.signal(_number, _raise_soon)
