"""Several workers on one GPU: a process group that carries what they send through host memory.

NCCL refuses two ranks on one device, so a layout of four could be tried only with four GPUs. This group lets any number of
workers share one. It is for proofs and drills: it brings what NCCL would have brought, and nothing is learnt of speed.

**What must be alike** is when things happen, since that is where faults hide that workers on a CPU never show. As with NCCL, a
call returns at once; what is sent is what the caller's stream will have computed by then; and `wait` lets the caller's *stream*
wait, not the host. So whoever forgets a wait reads what was there before, and whoever frees or overwrites too soon sends that.

How: each kind of transfer has a lane, which is a stream and a thread. All of a transfer is queued on the stream at once:

    caller's stream ──event──▶ copy to the host ▶ write "read" ▶ wait for "done" ▶ copy to the device ──event──▶ whoever waits
    thread                                        sees "read", sends and receives by gloo, writes "done"

The driver holds up the stream (cuStreamWaitValue32) until a number in pinned host memory is written, and the thread looks at
another. The thread calls nothing of CUDA, which may be busy with waiting for the stream that waits for this thread.

**Lanes.** Collectives of a group go in the order they were asked for. Messages between two ranks have lanes of their own, one
for each peer and direction, and meet in order, whatever their tags: NCCL knows none. That torch asks for several at once
(`batch_isend_irecv`) is not told to a group written in Python, so a receive never waits here for a send that was asked for
before it. NCCL, where such a batch is one kernel and batches follow one another, may stand still where this does not.

**Delays.** With `longest_delay` set, each transfer begins after a random while, before it reads what is to be sent: so a missing
wait, which goes well on most days, does not.

**Failures.** A peer that died breaks the connection. What the broken transfer should have brought never comes: the next call or
wait raises, of whichever group, and a host that stands still, because it waits for the GPU, ends after a while with the reason in
its log, as NCCL's watchdog would have it. Groups that are left let all streams go on.

Costs: a copy of everything that is sent in pinned memory, both ways through PCIe, and gloo between processes.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import sys
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

NAME = "through_host"
POLL_SECONDS = 5e-5
NOTICE_SECONDS = 10.0
"""How long a process may take to notice that a transfer failed, before it is ended."""
LAST_SECONDS = 2.0
"""How long a group that is left may take to send what others are waiting for."""
NO_TIMEOUT = timedelta(0)
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
"""Dtypes that gloo adds up."""

longest_delay = 0.0
"""Seconds that a transfer may be held back, at random; for tests."""


def _begins(numbers: Tensor) -> None:
    """A sum of these begins. Of its own groups' collectives torch tells those who watch operators, and of this one's nothing."""


for _name in ("allreduce_", "_reduce_scatter_base_"):  # as torch calls its own
    torch.library.define(f"shardwise::{_name}", "(Tensor numbers) -> ()")
    torch.library.impl(f"shardwise::{_name}", "default", _begins)


class Failure:
    """What broke the groups of this process, and whether it has been heard of."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._noticed = threading.Event()

    def check(self) -> None:
        """Raise what broke a group, if something did: to whichever is asked, for where one peer is gone none goes on."""
        if self.error is not None:
            self._noticed.set()
            raise RuntimeError(f"{NAME}: {self.error}") from self.error

    def happened(self, error: BaseException) -> None:
        """Keep the first, and end this process unless it is noticed soon. Called by the thread of a lane."""
        if self.error is None:
            self.error = error
        if not self._noticed.wait(NOTICE_SECONDS):
            print(f"a transfer between workers failed, and the GPU waits for it: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def leave(self) -> None:
        """Nobody is interested any more."""
        self._noticed.set()


@dataclass
class Transfer:
    """What goes from and to this rank at once, as its lane knows it."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    send: Callable[[list[Tensor], list[Tensor]], None]
    """Sends copies of the inputs, and fills copies of the outputs, all in host memory. Outputs that are inputs share a copy."""
    delay: float = field(default_factory=lambda: random.uniform(0.0, longest_delay))
    number: int = 0
    """In its lane, from 1."""
    copies: tuple[list[Tensor], list[Tensor]] = ([], [])
    done: threading.Event = field(default_factory=threading.Event)
    future: Future[list[Tensor]] = field(init=False)


class Lane:
    """Transfers that follow one another, each carried out by a thread. This one is for tensors in host memory, where waiting is
    the host's: it has all but the streams, and can be tried on any machine."""

    device = torch.device("cpu")

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure, self._asked, self._closed = failure, 0, False
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
            self._asked += 1
            transfer.number = self._asked
            work = self._queue(transfer)
            self._waiting.put(transfer)
        return work

    def close(self) -> None:
        """End the thread. What was asked for may end, for a while, unless something is broken."""
        self._waiting.put(None)
        if self._failure.error is None:
            self._thread.join(LAST_SECONDS)
        self._closed = True

    def _queue(self, transfer: Transfer) -> Work:
        transfer.future = Future()
        inputs = [tensor.clone() for tensor in transfer.inputs]
        transfer.copies = inputs, _copies(transfer, inputs, torch.empty_like)
        return Work(self._failure, transfer)

    def _let_it_read(self, transfer: Transfer) -> None:
        """Inputs may be read from now on; returns once they are."""

    def _let_it_end(self, transfer: Transfer) -> None:
        """What was received is in the copies of the outputs."""
        for tensor, copy in zip(transfer.outputs, transfer.copies[1], strict=True):
            tensor.data.copy_(copy)
        transfer.future.set_result(transfer.outputs)

    def _work(self) -> None:
        """Between two transfers nothing is held of the last."""
        while (transfer := self._waiting.get()) is not None:
            if self._closed:
                return
            try:
                time.sleep(transfer.delay)
                self._let_it_read(transfer)
                transfer.send(*transfer.copies)
                self._let_it_end(transfer)
            except BaseException as error:
                if not self._closed:
                    self._failure.happened(error)
                return
            finally:
                transfer.done.set()
            del transfer


class GpuLane(Lane):
    """Transfers on a stream, in the order of the file's drawing."""

    _START, _READ, _DONE = range(3)
    """Numbers in pinned memory: the last transfer that may read, that has read, and whose results are there."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pinned = torch.zeros(3, dtype=torch.int32, pin_memory=True)
        self._numbers = (ctypes.c_int32 * 3).from_address(self._pinned.data_ptr())
        self._driver = ctypes.CDLL("libcuda.so.1")
        super().__init__(name, failure)

    def close(self) -> None:
        super().close()
        for which in (self._START, self._DONE):  # streams that wait go on; nobody uses what they bring
            self._numbers[which] = self._asked

    def _queue(self, transfer: Transfer) -> Work:
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            if transfer.delay:
                self._hold(self._START, transfer.number)
            inputs = [_pinned(tensor).copy_(tensor.data, non_blocking=True) for tensor in transfer.inputs]
            outputs = _copies(transfer, inputs, _pinned)
            transfer.copies = inputs, outputs
            self._tell(self._READ, transfer.number)
            if transfer.outputs:
                self._hold(self._DONE, transfer.number)
            for tensor, copy in zip(transfer.outputs, outputs, strict=True):
                tensor.data.copy_(copy, non_blocking=True)  # `data`: as NCCL, it is no change that autograd minds
            for tensor in (*transfer.inputs, *transfer.outputs):
                tensor.record_stream(self._stream)
            transfer.future = Future(devices=[self.device])
            transfer.future.set_result(transfer.outputs)
        return GpuWork(self._failure, transfer, self._stream)

    def _let_it_read(self, transfer: Transfer) -> None:
        self._numbers[self._START] = transfer.number
        while self._numbers[self._READ] < transfer.number and not self._closed:
            time.sleep(POLL_SECONDS)

    def _let_it_end(self, transfer: Transfer) -> None:
        self._numbers[self._DONE] = transfer.number

    def _hold(self, which: int, number: int) -> None:
        """The stream waits until a number is at least this."""
        self._call("cuStreamWaitValue32_v2", which, number)

    def _tell(self, which: int, number: int) -> None:
        """The stream writes a number."""
        self._call("cuStreamWriteValue32_v2", which, number)

    def _call(self, name: str, which: int, number: int) -> None:
        address, at_least = self._pinned.data_ptr() + 4 * which, 0  # `at_least` is the driver's flag for a wait
        arguments = (ctypes.c_void_p(self._stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(number))
        if status := getattr(self._driver, name)(*arguments, ctypes.c_uint(at_least)):
            raise RuntimeError(f"{NAME}: the driver's {name} failed with status {status}; workers cannot share this GPU")


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
    """A transfer under way, of tensors in host memory."""

    def __init__(self, failure: Failure, transfer: Transfer) -> None:
        super().__init__()
        self._failure, self._future, self._done = failure, transfer.future, transfer.done

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Until it is over."""
        while not self._done.wait(POLL_SECONDS):
            self._failure.check()
        self._failure.check()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        """Of what it brings."""
        return self._future


class GpuWork(Work):
    """A transfer under way, of tensors on the GPU."""

    def __init__(self, failure: Failure, transfer: Transfer, stream: torch.cuda.Stream) -> None:
        super().__init__(failure, transfer)
        self._end = stream.record_event()
        self._is_barrier = not (transfer.inputs or transfer.outputs)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Let the current stream wait for it; a barrier is for the host, which does."""
        if self._is_barrier:
            return super().wait(timeout)
        self._failure.check()
        torch.cuda.current_stream().wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()


class ThroughHost(dist.ProcessGroup):
    """The group. torch finds it by name (`register`), and calls it where it would call NCCL's.

    torch 2.13 has new names for some collectives; a group answers to both.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, lane: Callable[[str, Failure], Lane] = Lane
    ) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
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
        self._failure.leave()
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

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
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

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Of each, which has a part for each rank, the sum of all ranks' parts for this one, added in the order of ranks."""
        if not _operation(opts) == dist.ReduceOp.SUM:  # torch's knows no `!=`
            raise NotImplementedError(f"{NAME}: reduce_scatter with {_operation(opts)}")
        for tensor in inputs:
            torch.ops.shardwise._reduce_scatter_base_(tensor.detach())

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
        row = own.element_size() * own[:1].numel() if own.shape[0] else output.element_size() * output[:1].numel()
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
        """To one rank. Nothing waits on the GPU but the copying: what was read may be overwritten."""
        return self._message(f"to {to}", tensors, [], lambda leaving, number: self._gloo.send(leaving, to, number).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """From one rank."""
        return self._message(
            f"from {source}", [], tensors, lambda arriving, number: self._gloo.recv(arriving, source, number).wait()
        )

    def _message(
        self, way: str, inputs: list[Tensor], outputs: list[Tensor], carry: Callable[[list[Tensor], int], object]
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


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(store, rank, size, timeout, GpuLane)


def _not_there(name: str) -> Callable[..., Any]:
    def call(self: ThroughHost, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError(f"{NAME}: {name}")

    return call


for _name in ("allgather_coalesced", "alltoall", "gather", "recv_anysource", "reduce", "reduce_scatter", "scatter"):
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
