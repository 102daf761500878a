"""The public side of a server: what workers pull, push, ask for and bring, each in a thread of its own.

One thread greets all callers, so that a flood of strangers costs at most `MOST_STRANGERS` connections and no
threads.

A `Shelf` has the newest weights to be pulled and the gradients that were pushed. The first server has a
`Desk` too, which deals out the work (work.py). A `Front` listens, greets, and talks with every worker; the
server's main thread takes what is due from the desk and the shelf, and puts new weights on the shelf.

A worker is known by the name of its connection. When that ends, what it was computing goes back to the desk;
what it has brought counts. Its pushed gradients are let go of once two updates in a row know nothing of them:
one list may have been written before the worker's last word reached the desk, the next was not.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.asynchronous import messages
from shardwise.asynchronous.wire import Stranger, Wire
from shardwise.asynchronous.work import Contribution, State, Work
from shardwise.comm.codecs import codec
from shardwise.config.compression import Compression
from shardwise.mesh.sockets import listen
from shardwise.resilience.channel import Credentials, UntrustedMessage

log = logging.getLogger("shardwise")

ASK_SECONDS = 1.0
"""How long a worker that asks is kept waiting before it is told to ask again."""
MOST_STRANGERS = 64
"""Callers that have not shown yet that they know the secret: the next one takes the place of the oldest."""
GREETER_SECONDS = 0.5
"""How long at most until the thread that greets callers notices that one's time is over."""
PATIENCE = 0.5
"""Of the time that a worker takes for a portion: for so long it is kept waiting for weights that are about to
come."""
OVERDUE, SHORTEST_OVERDUE = 20.0, 20.0
"""A portion that takes this many times as long as is usual, and at least so many seconds, is handed to
another."""

Key = tuple[str, int]
"""Of a pushed gradient: the worker and the portion."""
Slices = Mapping[str, tuple[slice, ...]]
"""What a server keeps of each parameter."""


class Shelf:
    """Of one server: the weights, and the gradients that were pushed; all flat, in the order of its
    slices."""

    def __init__(self, slices: Slices, dtype: torch.dtype, compression: Compression | None = None) -> None:
        """`compression`: how gradients are pushed; None: as they are."""
        self.slices, self.dtype = slices, dtype
        self._codec = None if compression is None else codec(compression)
        self.numbers = sum(math.prod(part.stop - part.start for part in where) for where in slices.values())
        self._lock = threading.Condition()
        self._version, self._weights = -1, torch.empty(0)
        self._closed = False
        self._gradients: dict[Key, Tensor] = {}
        self._spare: list[Tensor] = []
        self._gone: set[str] = set()
        """Workers whose connection has ended."""
        self._forgotten: set[Key] = set()
        """Gradients of such workers that the last update knew nothing of."""

    def publish(self, version: int, weights: Tensor) -> None:
        """From now on these are the weights. Nobody may change them any more: they may be on their way to a
        worker for long."""
        with self._lock:
            self._version, self._weights = version, weights
            self._lock.notify_all()

    def weights(self, least: int) -> tuple[int, Tensor]:
        """The newest, of this version at least, and their version. Servers do not reach a version in the same
        moment."""
        with self._lock:
            self._lock.wait_for(lambda: self._version >= least or self._closed)
            if self._version < least:
                raise EOFError("the server ends")
            return self._version, self._weights

    def close(self) -> None:
        """Free whoever waits for weights."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    @property
    def pushed_bytes(self) -> int:
        """Of a gradient, on the wire."""
        return (
            self.numbers * self.dtype.itemsize
            if self._codec is None
            else self._codec.compression.wire_bytes(self.numbers)
        )

    def read(self, wire: Wire, portion: int) -> Tensor:
        """The gradient of a portion, behind the message that was just received."""
        gradient = self.room()
        if self._codec is None:
            wire.read(gradient)
            return gradient
        encoded = torch.empty(1, self.pushed_bytes, dtype=torch.uint8)
        wire.read(encoded)
        try:
            self._codec.decode(encoded, gradient.unsqueeze(0), seed=portion)
        except (RuntimeError, IndexError) as error:
            raise UntrustedMessage(f"a gradient that cannot be decoded: {error}") from None
        return gradient

    def room(self) -> Tensor:
        """Memory for a gradient."""
        with self._lock:
            return self._spare.pop() if self._spare else torch.empty(self.numbers, dtype=self.dtype)

    def put(self, key: Key, gradient: Tensor) -> None:
        """Keep what was pushed."""
        with self._lock:
            self._let_go(key)
            self._gradients[key] = gradient

    def gone(self, worker: str) -> None:
        """Its connection has ended."""
        with self._lock:
            self._gone.add(worker)

    def take(self, used: Sequence[Key], brought: Iterable[Key], dropped: Iterable[Key]) -> list[Tensor]:
        """The gradients of an update, in that order; they are lent until `give_back`. `brought` are those
        that count later."""
        with self._lock:
            for key in dropped:
                self._let_go(key)
            taken = [self._gradients.pop(key) for key in used]
            unknown = {key for key in self._gradients if key[0] in self._gone} - set(brought)
            for key in unknown & self._forgotten:
                self._let_go(key)
            self._forgotten = unknown - self._forgotten
            self._gone &= {worker for worker, _ in self._gradients}
            return taken

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """They are summed."""
        with self._lock:
            self._spare.extend(taken)

    def _let_go(self, key: Key) -> None:
        gradient = self._gradients.pop(key, None)
        if gradient is not None:
            self._spare.append(gradient)


@dataclass(frozen=True)
class Update:
    """What the next update is made of: contributions by portion, and what was said of each."""

    contributions: tuple[Contribution, ...]
    staleness: tuple[int, ...]
    loss: float
    """Summed over items."""
    items: float
    tokens: int
    checksum: int
    brought: tuple[Key, ...]
    """What counts in a later update."""
    dropped: tuple[Key, ...]
    """What does not count at all."""

    @property
    def keys(self) -> list[Key]:
        """Of its gradients."""
        return [(one.worker, one.portion) for one in self.contributions]


class Desk:
    """Where workers ask and bring, and where the server waits for the next update.

    A worker that asks just before an update is made would read weights that are old at once. So it is kept
    waiting for a while if the gradients that are missing should be there within that time, as long as those
    who compute them took before.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self.work, self._clock = work, clock
        self._changed = threading.Condition()
        self._said: dict[int, messages.Bring] = {}
        """Of each portion that was brought and is not used yet."""
        self._since: dict[Key, float] = {}
        self._took: deque[float] = deque(maxlen=64)
        """Seconds from asking to bringing."""
        self._usual: dict[str, float] = {}
        """The same, of the last portion of each worker."""
        self._patient_until: dict[str, float] = {}
        """Of workers that wait for weights which are about to come."""
        self._dropped: list[Key] = []
        self._cut_off: set[str] = set()
        """Workers whose portion another has. They must come back under another name: else what is said of
        what they push, before and after, could be confused."""
        self._closed = False

    def ask(self, worker: str, seconds: float = ASK_SECONDS) -> messages.Task | messages.Wait | messages.End:
        """What this worker is to do, as soon as there is something, within so many seconds."""
        deadline = self._clock() + seconds
        with self._changed:
            while not self.work.ended:
                self._check(worker)
                now = self._clock()
                patient = self._patience(worker, now)
                portion = None if patient else self.work.ask(worker)
                if portion is not None:
                    self._since = {key: when for key, when in self._since.items() if key[0] != worker}
                    self._since[worker, portion] = now
                    self._patient_until.pop(worker, None)
                    return messages.Task(portion, self.work.version)
                if deadline <= now:
                    return messages.Wait()
                self._changed.wait(min(deadline - now, patient or math.inf))
            return messages.End()

    def bring(self, worker: str, said: messages.Bring) -> bool:
        """Whether it counts."""
        with self._changed:
            self._check(worker)
            counts = self.work.bring(worker, said.portion)
            if counts:
                self._said[said.portion] = said
                self._usual[worker] = self._clock() - self._since[worker, said.portion]
                self._took.append(self._usual[worker])
            else:
                self._dropped.append((worker, said.portion))
            self._since.pop((worker, said.portion), None)
            self._changed.notify_all()
            return counts

    def lost(self, worker: str) -> None:
        """Its connection has ended."""
        with self._changed:
            self._forget(worker)
            self._cut_off.discard(worker)

    def is_due(self) -> bool:
        """Whether the next update can be made."""
        with self._changed:
            return self.work.due() is not None

    def due(self, seconds: float) -> Update | None:
        """The next update, if it can be made within so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (used := self.work.due()) is None:
                self._hand_on_what_is_overdue()
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
            said = [self._said[one.portion] for one in used]
            keys = {one.portion for one in used}
            brought = tuple(
                (one.worker, one.portion) for one in self.work.unused() if one.portion not in keys
            )
            dropped, self._dropped = tuple(self._dropped), []
            return Update(
                contributions=tuple(used),
                staleness=tuple(self.work.staleness(used)),
                loss=math.fsum(one.loss for one in said),
                items=math.fsum(one.items for one in said),
                tokens=sum(one.tokens for one in said),
                checksum=sum(one.checksum for one in said),
                brought=brought,
                dropped=dropped,
            )

    def made(self, update: Update) -> None:
        """The update is in the weights, which are on every shelf."""
        with self._changed:
            self.work.update(list(update.contributions))
            for one in update.contributions:
                del self._said[one.portion]
            self._changed.notify_all()

    def state(self) -> State:
        """What of the data is in the weights, as of the last update."""
        with self._changed:
            return self.work.state()

    def close(self) -> None:
        """Let go of everybody who asks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _patience(self, worker: str, now: float) -> float:
        """For how many seconds the worker is better off waiting for the next weights."""
        usual = self._usual.get(worker)
        if usual is None or self.work.most_stale == 0:  # then weights are never old
            return 0.0
        until = self._patient_until.setdefault(worker, now + PATIENCE * usual)
        return until - now if until > now and self._next_version_by(now) <= until else 0.0

    def _next_version_by(self, now: float) -> float:
        """When the gradients of the next update should all be here; those that are late, any moment."""
        lacking = self.work.portions - len(self.work.unused())
        if lacking <= 0:
            return now  # it is being made
        due = sorted(
            max(now, since + self._usual.get(worker, math.inf)) for (worker, _), since in self._since.items()
        )
        return due[lacking - 1] if len(due) >= lacking else math.inf

    def _hand_on_what_is_overdue(self) -> None:
        if not self._took:
            return
        limit, now = max(SHORTEST_OVERDUE, OVERDUE * statistics.median(self._took)), self._clock()
        for worker in {worker for (worker, _), since in self._since.items() if now - since > limit}:
            log.warning("worker %s was not heard of for %.0f s: another does its portion", worker, limit)
            self._forget(worker)
            self._cut_off.add(worker)

    def _check(self, worker: str) -> None:
        if self._closed:
            raise EOFError("the server ends")
        if worker in self._cut_off:
            raise EOFError("it was not heard of for long")

    def _forget(self, worker: str) -> None:
        self.work.lost(worker)
        self._since = {key: when for key, when in self._since.items() if key[0] != worker}
        for known in (self._usual, self._patient_until):
            known.pop(worker, None)
        self._changed.notify_all()


class _Strangers:
    """Callers that have not shown yet that they know the secret, the oldest first. One thread waits for all
    of them."""

    def __init__(self, credentials: Credentials) -> None:
        self.selector = selectors.DefaultSelector()
        self._credentials = credentials
        self._strangers: dict[socket.socket, Stranger] = {}

    def __enter__(self) -> _Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._strangers):
            self._hang_up(connection)
        self.selector.close()

    def add(self, stranger: Stranger) -> None:
        """Wait for the answer of one more."""
        self._strangers[stranger.connection] = stranger
        self.selector.register(stranger.connection, selectors.EVENT_READ)

    def admitted(self, ready: Container[object]) -> Iterator[Wire]:
        """Return the connections of callers that have shown that they know the secret, and close the others
        that have spoken."""
        for connection, stranger in [entry for entry in self._strangers.items() if entry[0] in ready]:
            try:
                wire = stranger.admitted(self._credentials)
            except (OSError, UntrustedMessage):
                self._hang_up(connection)
                continue
            if wire is not None:
                self._forget(connection)
                yield wire

    def hang_up_on_late_ones(self) -> None:
        """Hang up on those whose time is over, and on the oldest while there are too many."""
        now = time.monotonic()
        for connection, stranger in list(self._strangers.items()):
            if stranger.deadline < now or len(self._strangers) > MOST_STRANGERS:
                self._hang_up(connection)

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self._strangers[connection]

    def _hang_up(self, connection: socket.socket) -> None:
        self._forget(connection)
        _hang_up(connection)


class Front:
    """Listens for workers, and talks with each in a thread of its own."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        shelf: Shelf,
        desk: Desk | None,
        job: str = "",
        rows: int = 1,
    ) -> None:
        """`job`: what tells it from others; `rows`: of a portion."""
        self._credentials, self._shelf, self._desk = credentials, shelf, desk
        self._job, self._rows = job, rows
        self._listener = listen(address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._closed = False
        self._greeter = threading.Thread(target=self._greet_callers, name="front", daemon=True)
        self._greeter.start()

    def close(self) -> None:
        """Hang up on everybody."""
        self._shelf.close()
        self._closed = True
        with suppress(
            OSError
        ):  # on some systems what only listens cannot be shut down; the thread looks up soon anyway
            self._listener.shutdown(socket.SHUT_RDWR)
        self._greeter.join()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()

    def _greet_callers(self) -> None:
        """Take callers in and greet them, until the server ends. A worker that knows the secret gets a
        thread."""
        with self._listener, _Strangers(self._credentials) as strangers:
            strangers.selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                ready = {key.fileobj for key, _ in strangers.selector.select(GREETER_SECONDS)}
                # Strangers come before the next caller, which may take the place of one that has just
                # answered.
                for wire in strangers.admitted(ready):
                    self._start_thread(wire)
                if self._listener in ready and (stranger := self._take_in()) is not None:
                    strangers.add(stranger)
                strangers.hang_up_on_late_ones()

    def _take_in(self) -> Stranger | None:
        """The next caller, greeted; None where it is gone already, or there is nothing left to take it in
        with."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:
                time.sleep(0.1)  # out of file descriptors, say
            return None
        try:
            return Stranger(connection)
        except OSError:
            _hang_up(connection)
            return None

    def _start_thread(self, wire: Wire) -> None:
        with self._lock:
            self._wires.add(wire)
        try:
            threading.Thread(target=self._converse, args=(wire,), name="worker", daemon=True).start()
        except RuntimeError as error:  # the system allows no more threads, for now
            log.warning("a worker was turned away, and may call again: %s", error)
            with self._lock:
                self._wires.discard(wire)
            wire.close()

    def _converse(self, wire: Wire) -> None:
        worker: str | None = None
        try:
            worker = self._welcome(wire)
            while self._answer(wire, worker):
                pass
        except (OSError, EOFError, UntrustedMessage) as error:
            if worker is not None and not self._closed:
                log.warning("worker %s is gone: %s", worker, error)
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.close()
            if worker is not None:
                self._shelf.gone(worker)
                if self._desk is not None:
                    self._desk.lost(worker)

    def _welcome(self, wire: Wire) -> str:
        message = _received(wire)
        if not isinstance(message, messages.Hello):
            raise UntrustedMessage(f"{message} before hello")
        slices = {
            name: tuple((part.start, part.stop) for part in where)
            for name, where in self._shelf.slices.items()
        }
        wire.send(messages.to_json(messages.Welcome(slices, self._job, self._rows)))
        return message.worker

    def _answer(self, wire: Wire, worker: str) -> bool:
        """Answer one message; whether there may be more."""
        text, behind = wire.receive()
        message = messages.from_json(text)
        if isinstance(message, messages.Push):
            if behind != self._shelf.pushed_bytes:
                raise UntrustedMessage(f"a gradient of {behind} bytes")
            self._shelf.put((worker, message.portion), self._shelf.read(wire, message.portion))
            wire.send(messages.to_json(messages.Stored()))
            return True
        if behind:
            raise UntrustedMessage(f"{behind} bytes behind {message}")
        match message:
            case messages.Pull(least, have):
                newest, weights = self._shelf.weights(least)
                wire.send(messages.to_json(messages.Weights(newest)), weights if newest != have else None)
            case messages.Ask() if self._desk is not None:
                task = self._desk.ask(worker)
                wire.send(messages.to_json(task))
                return not isinstance(task, messages.End)
            case messages.Bring() if self._desk is not None:
                wire.send(messages.to_json(messages.Noted(self._desk.bring(worker, message))))
            case _:
                raise UntrustedMessage(f"{message} to a server that has nothing to do with it")
        return True


def _received(wire: Wire) -> messages.Message:
    text, behind = wire.receive()
    if behind:
        raise UntrustedMessage(f"{behind} bytes behind {text}")
    return messages.from_json(text)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end may have been first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
