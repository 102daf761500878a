"""Several workers on one GPU: a process group that carries what they send through host memory.

NCCL refuses two ranks on one device, so a layout of four could be tried only with four GPUs. This group lets
any number of workers share one. It is for proofs and drills: it brings what NCCL would have brought, and
nothing is learnt of speed.

**What must be alike** is when things happen on the device, since that is where faults hide that workers on a
CPU never show. As with NCCL, a call returns at once; what is sent is what the caller's stream will have
computed by then; and nothing orders the caller's stream after a transfer but `wait`. So whoever forgets a
wait reads what was there before, and whoever overwrites too soon sends that.

**What is not alike.** `wait` also holds up the host, until the transfer is through. With NCCL the host runs
ahead; here a stream cannot be made to wait for what has not been sent yet. (The driver has a way to hold up a
stream until the host writes a number, cuStreamWaitValue32. It was tried, and stood still: what allocates
memory may wait for all streams, and then nobody sends.)

Each kind of transfer has a lane, which is a stream and a thread:

    caller's stream ──event──▶ copy to the host         copy to the device ──event──▶ the waiting stream
    thread                                      ▶ gloo ▶

**Lanes.** Collectives of a group go in the order they were asked for. Messages between two ranks have lanes
of their own, one for each peer and direction, and meet in order, whatever their tags: NCCL knows none. That
torch asks for several at once (`batch_isend_irecv`) is not told to a group written in Python, so a receive
never waits here for a send that was asked for before it. NCCL, where such a batch is one kernel and batches
follow one another, may stand still where this does not.

**Delays.** With `longest_delay` set, each transfer begins after a random while, before it reads what is to be
sent: so a missing wait, which goes well on most days, does not.

**Failures.** A peer that died breaks the connection, and the next call or wait of any group raises. NCCL
would stand still.

Costs: a copy of everything that is sent in pinned memory, both ways through PCIe, and gloo between
processes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

ProcessGroup: Any = dist.ProcessGroup
"""Whose methods have other types from release to release."""
NAME = "through_host"
POLL_SECONDS = 0.05
"""How often who waits for a transfer asks whether another has failed."""
LAST_SECONDS = 2.0
"""How long a group that is left may take to send what others are waiting for."""
NO_TIMEOUT = timedelta(0)
SUMMED = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""Dtypes that gloo adds up."""

longest_delay = 0.0
"""Seconds that a transfer may be held back, at random; for tests."""


def _begins(numbers: Tensor) -> None:
    """A sum of these begins. Of its own groups' collectives torch tells those who watch operators, and of
    this one's nothing."""


for _name in ("allreduce_", "reduce_scatter_"):  # as torch calls its own
    torch.library.define(f"shardwise::{_name}", "(Tensor numbers) -> ()")
    torch.library.impl(f"shardwise::{_name}", "default", _begins)


class Failure:
    """What broke the groups of this process: where one peer is gone, none goes on."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise it, if there was one."""
        if self.error is not None:
            raise RuntimeError(f"{NAME}: {self.error}") from self.error


@dataclass
class Transfer:
    """What goes from and to this rank at once."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    send: Callable[[list[Tensor], list[Tensor]], None]
    """Sends copies of the inputs, and fills copies of the outputs, all in host memory. Outputs that are
    inputs share a copy."""
    delay: float = field(default_factory=lambda: random.uniform(0.0, longest_delay))
    asked: Any = None
    """When its inputs are there: an event of the caller's stream; on the CPU, copies of them."""
    end: torch.cuda.Event | None = None
    """When its outputs are there, or its inputs were read if there are none; to be asked for once it is
    done."""
    done: threading.Event = field(default_factory=threading.Event)
    future: Future[list[Tensor]] = field(default_factory=Future)


class Lane:
    """Transfers that follow one another, each carried out by a thread. This one is for tensors in host
    memory: it has all but the streams, and can be tried on any machine."""

    device = torch.device("cpu")

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure, self._closed = failure, False
        self._waiting: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # backward calls from threads of its own
        self._thread = threading.Thread(target=self._work, name=f"{NAME} {name}", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def start(self, transfer: Transfer) -> Work:
        """Begin a transfer after those that were asked for before."""
        for tensor in (*transfer.inputs, *transfer.outputs):
            _check(tensor, self.device)
        with self._lock:
            self._failure.check()
            self._ask(transfer)
            self._waiting.put(transfer)
        return Work(self._failure, transfer)

    def close(self) -> None:
        """End the thread. What was asked for may end, for a while, unless something is broken."""
        self._waiting.put(None)
        if self._failure.error is None:
            self._thread.join(LAST_SECONDS)
        self._closed = True

    def _ask(self, transfer: Transfer) -> None:
        """Remember what is to be sent."""
        transfer.asked = [tensor.clone() for tensor in transfer.inputs]

    def _carry_out(self, transfer: Transfer) -> None:
        """From beginning to end."""
        inputs = transfer.asked
        outputs = _copies(transfer, inputs, torch.empty_like)
        transfer.send(inputs, outputs)
        for tensor, copy in zip(transfer.outputs, outputs, strict=True):
            tensor.data.copy_(copy)
        transfer.future.set_result(transfer.outputs)

    def _work(self) -> None:
        """Until the lane is closed. Between two transfers nothing is held of the last."""
        while (transfer := self._waiting.get()) is not None and not self._closed:
            try:
                self._failure.check()
                time.sleep(transfer.delay)
                with torch.no_grad():
                    self._carry_out(transfer)
            except Exception as error:
                if self._failure.error is None and not self._closed:
                    self._failure.error = error
                if not transfer.future.done():
                    transfer.future.set_exception(error)  # type: ignore[arg-type]
            transfer.done.set()
            del transfer


class GpuLane(Lane):
    """Transfers from and to a GPU, on a stream of their own."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        super().__init__(name, failure)

    def _ask(self, transfer: Transfer) -> None:
        transfer.asked = torch.cuda.current_stream(self.device).record_event()
        transfer.future = Future(devices=[self.device])
        for tensor in (*transfer.inputs, *transfer.outputs):
            tensor.record_stream(
                self._stream
            )  # whoever lets go of it, its memory stays until the stream is through

    def _carry_out(self, transfer: Transfer) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.asked)
            inputs = [_pinned(tensor).copy_(tensor.data, non_blocking=True) for tensor in transfer.inputs]
            read = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            read.record(self._stream)
            read.synchronize()
            if transfer.inputs and not transfer.outputs:  # a message to a peer: who sent it may go on
                self._ended(transfer, read)
            outputs = _copies(transfer, inputs, _pinned)
            transfer.send(inputs, outputs)
            for tensor, copy in zip(transfer.outputs, outputs, strict=True):
                tensor.data.copy_(
                    copy, non_blocking=True
                )  # `data`: as NCCL, it is no change that autograd minds
            if not transfer.done.is_set():
                self._ended(transfer, self._stream.record_event())

    def _ended(self, transfer: Transfer, end: torch.cuda.Event) -> None:
        transfer.end = end
        transfer.future.set_result(transfer.outputs)
        transfer.done.set()


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _copies(transfer: Transfer, inputs: Sequence[Tensor], make: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Host copies of the outputs: where one is an input too, that one's."""
    known = {id(tensor): copy for tensor, copy in zip(transfer.inputs, inputs, strict=True)}
    return [known[id(tensor)] if id(tensor) in known else make(tensor) for tensor in transfer.outputs]


def _check(tensor: Tensor, device: torch.device) -> None:
    """As NCCL does."""
    if tensor.device != device:
        raise ValueError(f"{NAME}: a tensor is on {tensor.device}, and this group's are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{NAME}: tensors must be contiguous")


class Work(dist.Work):
    """A transfer under way."""

    def __init__(self, failure: Failure, transfer: Transfer) -> None:
        super().__init__()
        self._failure, self._transfer = failure, transfer

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Until it is through; on a GPU, the current stream then goes on after it."""
        while not self._transfer.done.wait(POLL_SECONDS):
            self._failure.check()
        self._failure.check()
        if self._transfer.end is not None:
            torch.cuda.current_stream().wait_event(self._transfer.end)
        return True

    def is_completed(self) -> bool:
        """Whether it is through."""
        return self._transfer.done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        """Of what it brings."""
        return self._transfer.future


class ThroughHost(ProcessGroup):  # type: ignore[misc]
    """The group. torch finds it by name (`register`), and calls it where it would call NCCL's.

    torch 2.13 has new names for some collectives; a group answers to both.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        lane: Callable[[str, Failure], Lane] = Lane,
    ) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._make_lane, self._lanes, self._failure = lane, dict[str, Lane](), _present[0]
        self._name, self._text = "", ""
        self._messages: dict[str, int] = {}
        """How many have gone each way between this rank and another."""

    def getBackendName(self) -> str:  # noqa: N802
        """As torch's C++ asks for it."""
        return NAME

    def name(self) -> str:
        """As torch's Python does."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._text = text

    @property
    def group_name(self) -> str:
        """What torch calls this group; it keeps the names of its own in their backends."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch says that it is for."""
        return self._text

    def shutdown(self) -> None:
        """Part from the peers."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes, self._gloo = {}, None

    abort = shutdown

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None, *rest: Any) -> dist.Work:
        """Sum (or another operation) in place."""
        operation = _operation(opts)
        for tensor in tensors:
            if tensor.dtype not in SUMMED:
                raise NotImplementedError(f"{NAME}: allreduce of {tensor.dtype}")
            torch.ops.shardwise.allreduce_(tensor.detach())

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for tensor in arriving:
                if tensor.numel():
                    self._gloo.allreduce([tensor.view(-1)], operation).wait()

        return self._collective(tensors, tensors, send)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """What one rank has, to all."""
        root = opts.rootRank

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for tensor in arriving:
                if tensor.numel():
                    self._gloo.broadcast(_bytes(tensor), root).wait()

        return self._collective(tensors, tensors, send)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Everybody's tensor, to all, each into a tensor of its own."""
        if len(inputs) != 1:
            raise NotImplementedError(f"{NAME}: allgather of {len(inputs)} tensors at once")

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            if leaving[0].numel():
                self._gloo.allgather([[_bytes(tensor) for tensor in arriving]], [_bytes(leaving[0])]).wait()

        return self._collective(inputs, outputs[0], send)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Everybody's tensors, to all, each into one tensor."""

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for own, everybody in zip(leaving, arriving, strict=True):
                if own.numel():
                    self._gloo.allgather([list(_bytes(everybody).chunk(self.size()))], [_bytes(own)]).wait()

        return self._collective(inputs, outputs, send)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Everybody's tensor, to all, into one tensor."""
        return self.all_gather_single_coalesced([output], [own])

    _allgather_base = all_gather_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Of each, which has a part for each rank, the sum of all ranks' parts for this one, added in the
        order of ranks."""
        if not _operation(opts) == dist.ReduceOp.SUM:  # torch's knows no `!=`
            raise NotImplementedError(f"{NAME}: reduce_scatter with {_operation(opts)}")
        for tensor in inputs:
            torch.ops.shardwise.reduce_scatter_(tensor.detach())

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for parts, total in zip(leaving, arriving, strict=True):
                if not parts.numel():
                    continue
                came = torch.empty_like(parts)
                self._gloo.alltoall_base(_bytes(came), _bytes(parts), [], []).wait()
                rows = came.view(self.size(), -1)
                total.view(-1).copy_(rows[0])
                for row in rows[1:]:
                    total.view(-1).add_(row)

        return self._collective(inputs, outputs, send)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, opts: Any = None) -> dist.Work:
        """One tensor's."""
        return self.reduce_scatter_single_coalesced([output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Rows go to the ranks in order; without numbers of them, as many to each."""
        row = (
            own.element_size() * own[:1].numel()
            if own.shape[0]
            else output.element_size() * output[:1].numel()
        )
        coming, going = ([rows * row for rows in counts] for counts in (received, sent))

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            self._gloo.alltoall_base(_bytes(arriving[0]), _bytes(leaving[0]), coming, going).wait()

        return self._collective([own], [output], send)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, *rest: Any) -> dist.Work:
        """Until all have come, and what their streams had to do before is done."""
        return self._collective([], [], lambda leaving, arriving: self._gloo.barrier().wait())

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """To one rank. Who sends need not wait until it has come."""
        return self._message(
            f"to {to}", tensors, [], lambda leaving, number: self._gloo.send(leaving, to, number).wait()
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """From one rank."""
        return self._message(
            f"from {source}",
            [],
            tensors,
            lambda arriving, number: self._gloo.recv(arriving, source, number).wait(),
        )

    def _message(
        self,
        way: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        carry: Callable[[list[Tensor], int], object],
    ) -> dist.Work:
        number = self._messages[way] = self._messages.get(way, 0) + 1
        if len((*inputs, *outputs)) != 1:
            raise NotImplementedError(f"{NAME}: a message of {len((*inputs, *outputs))} tensors")

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            carry([_bytes(tensor) for tensor in (*leaving, *arriving)], number)

        return self._lane(way).start(Transfer(inputs, outputs, send))

    def _collective(
        self, inputs: list[Tensor], outputs: list[Tensor], send: Callable[[list[Tensor], list[Tensor]], None]
    ) -> dist.Work:
        return self._lane("collectives").start(Transfer(list(inputs), list(outputs), send))

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            if self._gloo is None:
                raise RuntimeError(f"{NAME}: this group was left")
            self._lanes[name] = self._make_lane(name, self._failure)
        return self._lanes[name]


_present = [Failure()]
"""Of the team that this process is in."""


def register() -> None:
    """Make the group known to torch, under `NAME`, for a team that begins."""
    _present[0] = Failure()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cuda"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(store, rank, size, timeout, GpuLane)


def _not_there(name: str) -> Callable[..., Any]:
    def call(self: ThroughHost, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError(f"{NAME}: {name}")

    return call


for _name in (
    "allgather_coalesced",
    "alltoall",
    "gather",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
):
    setattr(ThroughHost, _name, _not_there(_name))


def _operation(opts: Any) -> Any:
    """Of a sum: asked for in options, by itself, or not at all."""
    operation, known = getattr(opts, "reduceOp", opts), dist.ReduceOp
    if operation is None:
        return known.SUM
    if not any(operation == each for each in (known.SUM, known.MAX, known.MIN, known.PRODUCT)):
        raise NotImplementedError(f"{NAME}: a sum with {operation}")
    return operation


def _bytes(tensor: Tensor) -> Tensor:
    """gloo does not know all dtypes; bytes it does."""
    return tensor.reshape(-1).view(torch.uint8)
