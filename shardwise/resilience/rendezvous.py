"""How hosts hear of each other: each tells the leader its report, again and again, and gets its orders in
return.

One line each way over one connection a host (resilience/channel.py). Whatever goes wrong with it (a cut
cable, a leader that is not there yet), the host forgets the connection and dials anew; since a report says
everything and orders say everything, nothing is lost. The leader keeps only the newest report of each host,
with the time it came: no clocks are compared.

On each connection a host first says who it is (resilience/newcomer.py). One that does not fit the run is
answered with orders to end, which say why, and none of its reports reaches the leader.

Anyone may dial. A caller who has not shown that it knows the run's secret is given a few seconds and a few
hundred bytes, only so many of them are there at a time, and nothing that it says is looked at.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

from shardwise.errors import UserError
from shardwise.mesh.sockets import listen
from shardwise.resilience.channel import (
    HELLO_BYTES,
    LINE_BYTES,
    Channel,
    Credentials,
    NotOurs,
    TooLong,
    admit,
    answer,
    greeted_version,
    greeting,
)
from shardwise.resilience.newcomer import Newcomer, different_version, refusal
from shardwise.resilience.team import Orders, Refusal, Report

REPLY_SECONDS = 3.0
HELLO_SECONDS = 5.0
"""How long a caller may take to show that it knows the secret."""
IDLE_SECONDS = 60.0
"""How long a host that does not call keeps its connection."""
MOST_STRANGERS = 64
"""Callers that have not shown it yet: the next one takes the place of the oldest."""
_REFUSED = b"refused\n"


class Rendezvous:
    """The leader's end: takes reports, hands out the newest orders."""

    def __init__(self, address: str, port: int, credentials: Credentials, own: Newcomer) -> None:
        self._lock = threading.Lock()
        self._own = own
        """What other hosts are compared with."""
        self._new_refusals: list[Refusal] = []
        """Hosts that did not fit when they called."""
        self._refused: dict[str, Refusal] = {}
        """Hosts that fitted, and that the leader does not want any more."""
        self._reports: dict[str, tuple[Report, float]] = {}
        self._informed: set[str] = set()
        self._orders = Orders()
        self._message = self._orders.to_json()
        self._credentials = credentials
        self._callers: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Of the callers, those that have not shown that they know the secret, the oldest first."""
        try:
            self._listener = listen(address, port)
        except OSError as error:
            raise UserError(
                f"port {port} of {address}, where the nodes meet, cannot be used: {error.strerror}. Is "
                f"another run using it?"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )
        self._thread.start()

    def new_reports(self) -> list[tuple[Report, float]]:
        """The newest report of each host that sent one since the last call, and when it came."""
        with self._lock:
            reports, self._reports = list(self._reports.values()), {}
        return reports

    def new_refusals(self) -> list[Refusal]:
        """Hosts that were refused when they called, since the last call of this."""
        with self._lock:
            refusals, self._new_refusals = self._new_refusals, []
        return refusals

    def refuse(self, refused: Refusal) -> None:
        """Answer this host with orders to end from now on."""
        with self._lock:
            self._refused[refused.host] = refused
            self._reports.pop(refused.host, None)

    def tell(self, orders: Orders) -> None:
        """Answer every host with these orders from now on."""
        if orders is self._orders:
            return
        self._orders = orders
        message = orders.to_json()
        with self._lock:
            if message != self._message:
                self._message, self._informed = message, set()

    def all_know(self, hosts: set[str]) -> bool:
        """Whether the newest orders have reached all these hosts."""
        with self._lock:
            return hosts <= self._informed

    def has_ended(self) -> bool:
        """Whether hosts are told that the run is over."""
        return self._orders.wish == "end"

    def close(self) -> None:
        """Stop answering."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._converse, sock=self._listener, limit=LINE_BYTES)
        await self._closing.wait()
        server.close()
        for writer in self._callers:
            writer.transport.abort()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        self._strangers[writer] = None
        if len(self._strangers) > MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            channel = await asyncio.wait_for(self._greet(reader, writer), HELLO_SECONDS)
            self._strangers.pop(writer, None)
            first = await asyncio.wait_for(reader.readuntil(b"\n"), IDLE_SECONDS)
            refused = self._check_newcomer(channel.message(first))
            writer.write(channel.line(refused.orders().to_json() if refused else self._message))
            if refused:
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), IDLE_SECONDS)
                return
            while True:
                await asyncio.wait_for(writer.drain(), IDLE_SECONDS)
                line = await asyncio.wait_for(reader.readuntil(b"\n"), IDLE_SECONDS)
                writer.write(channel.line(self._answer(channel.message(line))))
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError, NotOurs, TooLong):
            pass  # a host that was cut off dials anew
        finally:
            self._strangers.pop(writer, None)
            self._callers.discard(writer)
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        greeted = greeting(self._own.version)
        writer.write(greeted)
        answered = await reader.readuntil(b"\n")
        try:
            return admit(self._credentials, greeted, answered[:HELLO_BYTES])
        except NotOurs:
            writer.write(_REFUSED)
            writer.close()
            await writer.wait_closed()
            raise

    def _check_newcomer(self, message: object) -> Refusal | None:
        """Why a host whose first message this is may not take part in the run; None if it may."""
        try:
            newcomer = Newcomer.from_json(message)
            host, workers, why = newcomer.host, newcomer.workers, refusal(self._own, newcomer)
        except ValueError:
            report = _report(message)  # as hosts began before they said their version
            host, workers = report.host, len(report.slots)
            why = different_version(
                host, "of an older version, which does not say its number", self._own.version
            )
        if why is None:
            return None
        refused = Refusal(host, workers, why)
        with self._lock:
            self._new_refusals.append(refused)
        return refused

    def _answer(self, message: object) -> object:
        report = _report(message)
        with self._lock:
            if report.host in self._refused:
                return self._refused[report.host].orders().to_json()
            self._reports[report.host] = (report, time.monotonic())
            self._informed.add(report.host)
            return self._message


def _report(message: object) -> Report:
    try:
        return Report.from_json(message)
    except ValueError as error:
        raise NotOurs(f"no report: {error}") from None


class RendezvousClient:
    """A host's end. `call` never blocks for longer than a few seconds, and returns None while the leader is
    out of reach."""

    def __init__(self, find: Callable[[], tuple[str, int, Credentials | None]], own: Newcomer) -> None:
        self._find, self._own = find, own
        self.address, self.port, _ = find()
        self.own_address = ""
        """This host's, as the leader sees it, once it was dialled."""
        self.refused = False
        """Whether somebody answered the last call who does not know this run's secret, or is of an older
        version."""
        self.older = False
        """Whether that was a leader of a shardwise that does not say its version."""
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._received = b""
        self._refused_by: Orders | None = None
        """Orders to end, where the leader answered this host's first word with them."""

    def call(self, report: Report) -> Orders | None:
        """Tell the leader how things are here; what it wants."""
        deadline = time.monotonic() + REPLY_SECONDS
        try:
            channel = self._channel or self._dial(deadline)
            if self._refused_by is not None:
                return self._refused_by
            self._send(_fitting(channel, report), deadline)
            orders = Orders.from_json(channel.message(self._line(deadline)))
        except NotOurs:
            self.refused = True
        except (OSError, ValueError):
            self.refused = False
        else:
            self.refused = False
            return orders
        self.close()
        return None

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._channel, self._received = None, None, b""

    def _dial(self, deadline: float) -> Channel:
        self.address, self.port, credentials = self._find()
        if credentials is None:
            raise OSError("the run's secret is not known yet")
        self._socket = socket.create_connection((self.address, self.port), timeout=REPLY_SECONDS)
        self.own_address = str(self._socket.getsockname()[0])
        greeted = self._line(deadline)
        hello, channel = answer(credentials, greeted)
        self.older = not greeted_version(greeted)
        if self.older:  # it would put this host into a team without having compared anything
            raise NotOurs("the leader does not say its version")
        self._send(hello + channel.line(self._own.to_json()), deadline)
        orders = Orders.from_json(channel.message(self._line(deadline)))
        self._refused_by = orders if orders.wish == "end" else None
        self._channel = channel
        return channel

    def _send(self, line: bytes, deadline: float) -> None:
        assert self._socket is not None, "it has dialled"
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        self._socket.sendall(line)

    def _line(self, deadline: float) -> bytes:
        assert self._socket is not None, "it has dialled"
        while b"\n" not in self._received:
            if len(self._received) > LINE_BYTES:
                raise NotOurs("a line without end")
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the leader hung up")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


def _fitting(channel: Channel, report: Report) -> bytes:
    """A report as it is sent; without the traces of its faults where they are too long for a line."""
    try:
        return channel.line(report.to_json())
    except TooLong:
        return channel.line(report.without_traces().to_json())
