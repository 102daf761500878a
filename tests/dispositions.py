"""Signals as a new process has them, however the tests were started.

A process inherits which signals are ignored and which are blocked. `nohup` ignores SIGHUP, and a shell
ignores SIGINT in what it runs in the background. Without this module, tests that send these signals would
depend on how somebody typed `make test`.
"""

from __future__ import annotations

import signal

_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def forget_inherited_signals() -> None:
    """Unblock all signals, and give the ignored ones their default handlers.

    An ignored SIGHUP gets a handler that does nothing: the tests go on when the terminal closes, as `nohup`
    promises, and every program that they start has the default handler, because `exec` resets handlers but
    keeps ignored signals ignored.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, (lambda *_: None) if number == signal.SIGHUP else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
