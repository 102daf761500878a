"""The store in which workers of one team after another find each other, held by a process that outlives every
team.

torch's TCPStore needs torch, which the host itself does without: importing it would cost as much processor
time again as in the server that workers are forked from. So the store has a process of its own, forked from
that same server in a moment. It ends with the host, also where the host is killed, and with nothing else: not
with the server, which the host can start again, and not by a SIGTERM that a scheduler sends to every process
of the job, while workers still save.

Should it be killed all the same, a team that trains does not need it. The next one does: its workers would
wait half an hour for a store that is gone. So whoever forms a team asks where the store is, and another is
opened if it is nowhere.
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
from shardwise.resilience.forked import Died, end, fork
from shardwise.resilience.server import ensure_server, wake_server
from shardwise.resilience.stopping import signal_on_death_of_parent

FindPort = Callable[[], int]
"""The port of a store that is there."""


@contextmanager
def open_store(address: str) -> Iterator[FindPort]:
    """Hold a store at this address of the machine, for as long as the `with` block lasts."""
    with closing(_Store(address)) as store:
        yield store.port


class _Store:
    """A store, and the next one should its process be killed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._port = self._open()

    def port(self) -> int:
        """Where it is; where it was lost, that of a new one."""
        if self._process.pipe.poll():  # it says nothing more: this is its end
            print(
                "warning: the store in which workers meet was lost; another is opened",
                file=sys.stderr,
                flush=True,
            )
            self.close()
            self._port = self._open()
        return self._port

    def close(self) -> None:
        """End it."""
        self._held.close()

    def _open(self) -> int:
        """Start its process; its port."""
        with ExitStack() as held:
            try:
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-store-"))
            except OSError as error:
                raise RunFailed(
                    f"{tempfile.gettempdir()} takes no files ({error.strerror}); make room there"
                ) from None
            ensure_server()
            wake_server()  # should somebody have stopped it
            self._process = fork(0, _hold, (self._address,), Path(folder))
            held.callback(end, [self._process])
            port = self._process.hear()
            if isinstance(port, Died):
                raise RunFailed(f"the store in which workers meet could not be opened: {port.message}")
            self._held = held.pop_all()
            return int(port)


def _hold(pipe: Connection, address: str) -> None:
    from shardwise.mesh import open_rendezvous_store

    signal_on_death_of_parent(
        signal.SIGCONT
    )  # the server's: where it ended with the host, a store that is stopped must see it
    store = open_rendezvous_store(address)
    pipe.send(store.port)
    pipe.poll(None)  # nothing is ever sent: this returns when the host is gone
