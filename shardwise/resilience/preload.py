"""The first thing that the server imports: what holds for it, and for whoever is forked from it.

It collects no garbage, and its workers do. Importing torch makes hundreds of thousands of objects and hardly
any garbage, and looking for it took a sixth of the server's time. In a worker what was imported counts as
permanent: its collections look at what the worker made, and leave the pages that all workers share
untouched.

It ends with the command that started it, and its workers with it, whatever ended the command and whatever
they are doing: the kernel kills them (PR_SET_PDEATHSIG, Linux), also those that are stopped and would read
the end of no pipe.
"""

from __future__ import annotations

import gc
import os

from shardwise.resilience.stopping import signal_on_death_of_parent

_forking: list[int] = []
"""The process that forks now."""


def _begin_worker() -> None:
    signal_on_death_of_parent()
    if os.getppid() != _forking[0]:  # it died before that took hold
        os._exit(1)
    gc.freeze()
    gc.enable()


def _note_parent() -> None:
    _forking[:] = [os.getpid()]


gc.disable()
signal_on_death_of_parent()
os.register_at_fork(before=_note_parent, after_in_child=_begin_worker)
