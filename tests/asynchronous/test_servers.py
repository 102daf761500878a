"""The public side of a server, with workers that are threads, strangers, and a main thread that makes updates
of integers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import psutil
import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, job, start

from shardwise.asynchronous import listener as listening
from shardwise.asynchronous import messages
from shardwise.asynchronous import scheduler as scheduling
from shardwise.asynchronous.gradient_store import GradientStore
from shardwise.asynchronous.listener import Listener
from shardwise.asynchronous.messages import (
    Ask,
    Bring,
    End,
    Hello,
    Message,
    Noted,
    Pull,
    Push,
    Stored,
    Task,
    Wait,
    Welcome,
)
from shardwise.asynchronous.portions import Portions
from shardwise.asynchronous.scheduler import Scheduler
from shardwise.asynchronous.wire import Wire, dial
from shardwise.codecs import parse_row_codec
from shardwise.drivers.contributions import Contributions, credentials
from shardwise.mesh import open_rendezvous_store
from shardwise.mesh.sockets import LOOPBACK
from shardwise.resilience.channel import Credentials

OURS = Credentials("server", b"a secret of the run")
SLICES = {"weight": (slice(0, 2), slice(0, 3)), "bias": (slice(4, 8),)}


class Served:
    """A server whose weights are sums of what was pushed: gradients are one-hot at their portion, modulo the
    numbers."""

    def __init__(self, work: Portions) -> None:
        self.work, self.store, self.scheduler = work, GradientStore(SLICES, torch.float32), Scheduler(work)
        self.weights = torch.zeros(10)
        self.store.publish(0, self.weights.clone())
        self.listener = Listener(LOOPBACK, OURS, self.store, self.scheduler)
        self.used: list[int] = []
        self.thread = threading.Thread(target=self._update)
        self.thread.start()

    def _update(self) -> None:
        while not self.work.ended:
            update = self.scheduler.due(0.05)
            if update is None:
                continue
            taken = self.store.take(update.keys, update.brought, update.dropped)
            for gradient in taken:
                self.weights += gradient
            self.store.give_back(taken)
            self.used += [one.portion for one in update.contributions]
            self.store.publish(self.work.version + 1, self.weights.clone())
            self.scheduler.made(update)

    def end(self) -> None:
        self.work.updates = 0
        self.thread.join(10)
        self.scheduler.close()
        self.listener.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(Portions(*request.param))
    yield served
    served.end()


def said(wire: Wire, message: messages.FromWorker, tensor: torch.Tensor | None = None) -> Message:
    wire.send(messages.to_json(message), tensor)
    text, behind = wire.receive()
    if behind:
        wire.read(torch.empty(behind, dtype=torch.uint8))
    return messages.from_json(text)


def work_until_the_end(served: Served, name: str, chance: random.Random, deaths: float) -> None:
    """A worker that, now and then, is cut off at any point and comes back under another name."""
    life = 0
    while True:
        life += 1
        wire = dial(LOOPBACK, served.listener.port, OURS)
        try:
            assert isinstance(said(wire, Hello(f"{name}-{life}")), Welcome)
            while chance.random() >= deaths:
                task = said(wire, Ask())
                if isinstance(task, End):
                    return
                if isinstance(task, Wait):
                    continue
                assert isinstance(task, Task)
                said(wire, Pull(task.version, -1))
                if chance.random() < deaths:
                    break
                gradient = torch.zeros(10)
                gradient[task.portion % 10] = 1
                assert isinstance(said(wire, Push(task.portion), gradient), Stored)
                if chance.random() < deaths:
                    break
                assert isinstance(said(wire, Bring(task.portion, 1.0, 1, 1, 1)), Noted)
        finally:
            wire.close()


@pytest.mark.parametrize(
    "served", [(3, 40, bound, again) for bound in (0, 2, None) for again in (False, True)], indirect=True
)
def test_every_portion_is_in_the_weights_once_though_workers_come_and_go(served: Served) -> None:
    workers = [
        threading.Thread(target=work_until_the_end, args=(served, f"w{index}", random.Random(index), 0.1))
        for index in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    served.thread.join(10)
    assert sorted(served.used) == list(range(120))
    assert served.weights.tolist() == [12.0] * 10
    assert len(served.store._gradients) <= 8, "what nobody will use is let go of"


@pytest.mark.parametrize("served", [(1, 10, 0)], indirect=True)
def test_a_flood_of_strangers_opens_no_thread_and_keeps_few_connections(served: Served) -> None:
    threads, descriptors = threading.active_count(), psutil.Process().num_fds()
    flood = []
    most = 0
    for index in range(500):
        flood.append(socket.create_connection((LOOPBACK, served.listener.port), timeout=5))
        if index % 3 == 0:
            with suppress(OSError):  # hung up on already
                flood[-1].sendall(b"0123")  # the beginning of an answer
        most = max(most, threading.active_count() - threads)
    wire = dial(LOOPBACK, served.listener.port, OURS)  # greeted once all of them were taken in
    assert isinstance(said(wire, Hello("honest")), Welcome)
    kept = psutil.Process().num_fds() - descriptors - len(flood) - 1
    assert most == 0
    assert kept <= listening.MAX_STRANGERS + 1
    wire.close()
    for stranger in flood:
        stranger.close()
    work_until_the_end(served, "another", random.Random(0), 0.0)


@pytest.mark.parametrize("served", [(1, 10, 0)], indirect=True)
def test_a_thread_that_cannot_start_turns_one_worker_away_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing, start = [1, 2], threading.Thread.start

    def refuse_first(thread: threading.Thread) -> None:
        if thread.name == "worker" and refusing:
            refusing.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    for _ in range(2):
        wire = dial(LOOPBACK, served.listener.port, OURS)
        with pytest.raises((EOFError, OSError)):
            said(wire, Hello("turned away"))
        wire.close()
    work_until_the_end(served, "honest", random.Random(0), 0.0)
    assert sorted(served.used) == list(range(10))
    assert "can't start new thread" in caplog.text


@pytest.mark.parametrize("served", [(1, 10, 0)], indirect=True)
def test_strangers_change_nothing_and_take_no_memory(served: Served) -> None:
    """Over a thousand connections that say nothing, garbage, or the right thing with the wrong secret."""
    chance = random.Random(0)
    before = served.store.weights(0)[1].clone()
    memory = psutil.Process().memory_info().rss
    kept = []
    for index in range(1000):
        stranger = socket.create_connection((LOOPBACK, served.listener.port), timeout=5)
        kind = index % 4
        if kind == 0:
            kept.append(stranger)  # says nothing
            continue
        with stranger, suppress(OSError):  # it may be hung up on before it has said all
            if kind == 1:
                stranger.sendall(chance.randbytes(chance.randrange(1, 2000)))
            elif kind == 2:
                stranger.recv(100)
                stranger.sendall(b"%032x %064x\n" % (chance.getrandbits(128), chance.getrandbits(256)))
            else:
                stranger.recv(100)
                stranger.sendall(b"%032x %064x\n" % (0, 0) + chance.randbytes(1 << 12))
    for stranger in kept:
        stranger.close()
    assert served.work.version == 0
    assert torch.equal(served.store.weights(0)[1], before)
    assert psutil.Process().memory_info().rss - memory < 64 << 20
    work_until_the_end(served, "honest", chance, 0.0)
    assert sorted(served.used) == list(range(10))


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ({"kind": "push", "portion": 0}, 4),
        ({"kind": "push", "portion": 0}, 44),
        ({"kind": "pull", "least": 0, "have": -1}, 4),
        ({"kind": "pull", "least": -1, "have": -1}, 0),
        ({"kind": "welcome", "slices": {}}, 0),
        ({"kind": "bring", "portion": 0, "loss": "much", "items": 1, "tokens": 1, "checksum": 1}, 0),
        ({"kind": "what"}, 0),
        ({}, 0),
    ],
)
@pytest.mark.parametrize("served", [(1, 10, 0)], indirect=True)
def test_a_worker_that_talks_nonsense_is_hung_up_on(
    served: Served, text: dict[str, object], behind: int
) -> None:
    wire = dial(LOOPBACK, served.listener.port, OURS)
    assert isinstance(said(wire, Hello("odd")), Welcome)
    with suppress(OSError):  # it may hang up before it has heard all
        wire.send(text, torch.ones(behind // 4) if behind else None)
    with pytest.raises((EOFError, OSError)):
        wire.receive()
    wire.close()
    assert served.work.state().missing == ()


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "sign", "topk(0.5)", "qsgd(4)"])
def test_a_gradient_in_fewer_bits_is_decoded_and_nonsense_is_hung_up_on(codec: str) -> None:
    compression = parse_row_codec(codec)
    store, scheduler = GradientStore(SLICES, torch.float32, compression), Scheduler(Portions(1, 2, 0))
    store.publish(0, torch.zeros(10))
    listener = Listener(LOOPBACK, OURS, store, scheduler)
    try:
        wire, gradient = dial(LOOPBACK, listener.port, OURS), torch.linspace(-1, 1, 10)
        said(wire, Hello("worker"))
        task = said(wire, Ask())
        assert isinstance(task, Task)
        encoded = compression.encode(gradient.clone().unsqueeze(0), seed=task.portion)
        assert said(wire, Push(task.portion), encoded) == Stored()
        decoded = torch.zeros(1, 10)
        compression.decode(encoded, decoded, seed=task.portion)
        assert said(wire, Bring(task.portion, 1.0, 1, 1, 1)) == Noted(True)
        update = scheduler.due(5.0)
        assert update is not None
        assert torch.equal(store.take(update.keys, (), ())[0], decoded[0])
        with suppress(OSError):
            wire.send(messages.to_json(Push(1)), torch.full((encoded.numel() + 1,), 255, dtype=torch.uint8))
        with pytest.raises((EOFError, OSError)):
            wire.receive()
    finally:
        listener.close()


@pytest.mark.parametrize("served", [(1, 3, 0)], indirect=True)
def test_the_only_worker_stands_still_and_is_handed_its_portion_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "SHORTEST_OVERDUE", 0.2)
    monkeypatch.setattr(scheduling, "OVERDUE", 1.0)
    wire = dial(LOOPBACK, served.listener.port, OURS)
    said(wire, Hello("once"))
    for portion in range(2):
        assert said(wire, Ask()) == Task(portion, portion)
        said(wire, Push(portion), torch.ones(10))
        if portion:
            time.sleep(0.5)
            with pytest.raises((EOFError, OSError)):
                said(wire, Bring(portion, 1.0, 1, 1, 1))
        else:
            assert said(wire, Bring(portion, 1.0, 1, 1, 1)) == Noted(True)
    wire.close()
    work_until_the_end(served, "again", random.Random(0), 0.0)
    assert sorted(served.used) == [0, 1, 2]


@pytest.mark.parametrize("served", [(1, 2, 0)], indirect=True)
def test_a_worker_that_stands_still_is_done_without(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "SHORTEST_OVERDUE", 0.2)
    monkeypatch.setattr(scheduling, "OVERDUE", 1.0)
    quick, slow = (dial(LOOPBACK, served.listener.port, OURS) for _ in range(2))
    said(quick, Hello("quick"))
    said(slow, Hello("slow"))
    first = said(quick, Ask())
    assert isinstance(first, Task)
    said(quick, Push(first.portion), torch.ones(10))
    assert said(quick, Bring(first.portion, 1.0, 1, 1, 1)) == Noted(True)
    second = said(slow, Ask())
    assert isinstance(second, Task)
    while isinstance(third := said(quick, Ask()), Wait):
        pass
    assert third == second, "the portion of the one that stands still"
    said(quick, Push(second.portion), torch.ones(10))
    assert said(quick, Bring(second.portion, 1.0, 1, 1, 1)) == Noted(True)
    said(slow, Push(second.portion), torch.ones(10))
    with pytest.raises((EOFError, OSError)):  # it has to come back under another name
        said(slow, Bring(second.portion, 1.0, 1, 1, 1))
    quick.close()
    slow.close()


class TestPatience:
    """Two portions make an update, and a bound lets everybody go ahead. A portion takes 4 s, by a clock that
    is only imagined."""

    def setup_method(self) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(Portions(portions=2, updates=10, max_staleness=4), clock=lambda: self.now)
        for worker in "ab":
            assert self.scheduler.ask(worker, 0) == Task("ab".index(worker), 0)
        self.now = 4.0
        for worker in "ab":
            assert self.scheduler.bring(worker, Bring("ab".index(worker), 0.0, 1, 1, 0))

    def make(self) -> None:
        update = self.scheduler.due(0)
        assert update is not None
        self.scheduler.made(update)

    def test_a_worker_waits_for_an_update_that_is_being_made(self) -> None:
        assert isinstance(self.scheduler.ask("a", 0), Wait)
        self.make()
        assert self.scheduler.ask("a", 0) == Task(2, 1)

    def test_but_not_for_longer_than_half_a_portion(self) -> None:
        assert isinstance(self.scheduler.ask("a", 0), Wait)
        self.now += 2.01
        assert self.scheduler.ask("a", 0) == Task(2, 0)

    def test_it_waits_for_what_another_should_bring_soon_and_for_nothing_else(self) -> None:
        self.make()
        assert self.scheduler.ask("a", 0) == Task(2, 1)
        self.now += 3.0
        assert self.scheduler.ask("b", 0) == Task(3, 1)
        self.now += 1.0
        self.scheduler.bring("a", Bring(2, 0.0, 1, 1, 0))
        assert self.scheduler.ask("a", 0) == Task(4, 1), "b needs 3 s more, and half a portion is 2 s"
        self.now += 1.5
        self.scheduler.lost("a")
        self.scheduler.bring("b", Bring(3, 0.0, 1, 1, 0))
        assert self.scheduler.ask("c", 0) == Task(4, 1), "of a new one it is not known how long it takes"


def test_what_the_store_holds_opens_no_server_and_the_key_of_the_hosts_does(corpus: str) -> None:
    key = Credentials("run", b"the secret of this run").derived_key("server")
    store = open_rendezvous_store()
    worker = replace(ALONE, address=LOOPBACK, port=store.port, store_name="a prefix", server_key=key)
    tables = job(corpus, model=FAMILIES["llama"], train={"driver": "server"})
    training = start(worker, {**tables, "server": {"portions": 2}})
    with closing(Contributions(training, stop_asked=lambda: False, waiting=lambda: None)):
        (name,) = [name for name in store.list_keys() if "listener" in name]
        assert "a prefix" in name
        _, _, port = store.get(name).decode().rpartition(" ")
        for known in (name, "a prefix", "a prefix-0-word", name.partition("-")[0]):
            stranger = dial(LOOPBACK, int(port), Credentials("server", known.encode()))
            with closing(stranger), pytest.raises((EOFError, OSError)):
                said(stranger, Hello("stranger"))
        with closing(dial(LOOPBACK, int(port), credentials(worker))) as ours:
            assert isinstance(said(ours, Hello("ours")), Welcome)


def test_every_host_of_a_run_derives_the_same_key_and_no_other_run_does() -> None:
    key = OURS.derived_key("server")
    assert key == Credentials(OURS.run, OURS.secret).derived_key("server")
    for other in (Credentials("another", OURS.secret), Credentials(OURS.run, b"another secret of a run")):
        assert other.derived_key("server") != key
    assert key not in (OURS.secret, OURS.derived_key("another purpose"))
