"""The store in which the workers of every team find each other, in a process that outlives all teams.

torch's TCPStore needs torch, which the host itself does not import: that would cost as much processor time
again as in the fork server. The store therefore has a process of its own, forked quickly from that server. It
ends with the host, even if the host is killed, and with nothing else: not with the server, which the host can
start again, and not by a SIGTERM that a scheduler sends to every process of the job while workers still save.

If the store's process is killed, a team that trains does not need it, but the workers of the next team would
wait half an hour for it. The port is therefore asked for whenever a team is formed, and a new store is opened
if the old one is gone.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.errors import RunFailed
from shardwise.resilience.fork_server import ensure_server, wake_server
from shardwise.resilience.forked_process import ProcessDied, end_processes, fork_process
from shardwise.resilience.stopping import signal_on_death_of_parent

FindPort = Callable[[], int]
"""Function that returns the port of a store that exists."""


@contextmanager
def open_store(address: str) -> Iterator[FindPort]:
    """Keep a store open at this address of the machine, as long as the `with` block lasts."""
    with closing(_Store(address)) as store:
        yield store.port


class _Store:
    """A store, and the next one if its process is killed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._port = self._open()

    def port(self) -> int:
        """Return the port of the store, or of a new store if it was lost."""
        if self._process.pipe.poll():  # it sends nothing after its port, so this is the end of the pipe
            print(
                "warning: the store in which workers meet was lost; another is opened",
                file=sys.stderr,
                flush=True,
            )
            self.close()
            self._port = self._open()
        return self._port

    def close(self) -> None:
        """End the process of the store."""
        self._resources.close()

    def _open(self) -> int:
        """Start the process of the store. Return its port."""
        with ExitStack() as resources:
            try:
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-store-"))
            except OSError as error:
                problem = f"{tempfile.gettempdir()} takes no files ({error.strerror})"
                raise RunFailed(f"{problem}; make room there") from None
            ensure_server()
            wake_server()  # somebody may have stopped it
            self._process = fork_process(0, _hold, (self._address,), Path(folder))
            resources.callback(end_processes, [self._process])
            port = self._process.receive()
            if isinstance(port, ProcessDied):
                raise RunFailed(f"the store in which workers meet could not be opened: {port.message}")
            self._resources = resources.pop_all()
            return int(port)


def _hold(pipe: Connection, address: str) -> None:
    from shardwise.mesh import open_rendezvous_store

    # The parent is the fork server, which may end with the host. A stopped store must then continue, so that
    # it notices the end of the host.
    signal_on_death_of_parent(signal.SIGCONT)
    store = open_rendezvous_store(address)
    pipe.send(store.port)
    pipe.poll(None)  # the host sends nothing, so this returns when the host is gone
