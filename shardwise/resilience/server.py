"""The process that workers are forked from: it imports torch once, and a new worker is there in a moment.

Importing this module needs no torch, so the server can be started first and do its imports while the command that started it
still reads its job. The server has no threads of computation and touches no GPU, so forking it is safe.

A scheduler that ends a job signals this process too, and multiprocessing's resource tracker. Both hold back, from their first
instruction, the signals that ask a run to stop (stopping.py), and so does whatever is forked, until it lets them through.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from shardwise.resilience.stopping import STOP_SIGNALS


def start_server(preload: Sequence[str]) -> None:
    """Start it, if it does not run yet. It ends with the thread that calls this (preload.py): the main one."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["shardwise.resilience.preload", *preload])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a new process has its parent's mask
    try:
        resource_tracker.ensure_running()  # lets two of them through again here, once the tracker is there
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
