"""Several workers on one GPU: a process group that sends tensors through host memory.

NCCL refuses two ranks on one device, so a layout of four workers would need four GPUs even to be tried. With
this group, any number of workers share one GPU. It is for proofs and drills: it delivers the same tensors as
NCCL, but its speed says nothing about NCCL's.

**What is the same as with NCCL** is the order of events on the device, because that is where faults hide that
workers on a CPU never show. A call returns at once. It sends what the caller's stream will have computed by
then. Only `wait` orders the caller's stream after a transfer. Code that forgets to wait therefore reads old
values, and code that overwrites an input too early sends the new values.

**What is different.** `wait` also blocks the host until the transfer has ended. With NCCL the host runs
ahead; here a stream cannot wait for data that were not sent yet. (The driver can block a stream until the
host writes a number, with cuStreamWaitValue32. That was tried and led to a deadlock: an allocation may wait
for all streams, and then nothing is sent.)

Each kind of transfer has a queue, which consists of a stream and a thread:

    caller's stream ──event──▶ copy to the host         copy to the device ──event──▶ the waiting stream
    thread                                      ▶ gloo ▶

**Queues.** The collectives of a group run in the order of the calls. Messages between two ranks have their
own queues, one for each peer and direction. They are matched in order and not by their tags, as in NCCL.
torch does not tell a group written in Python that several messages belong to one batch (`batch_isend_irecv`),
so a receive never waits here for an earlier send. In NCCL a batch is one kernel and batches follow each
other, so NCCL can deadlock where this group does not.

**Delays.** If `longest_delay` is set, each transfer waits for a random time before it reads its inputs. A
missing wait, which usually goes unnoticed, then shows.

**Failures.** If a peer dies, its connection breaks, and the next call or wait of any group raises an error.
NCCL would hang.

**Costs.** Everything that is sent is copied to pinned memory and back, through PCIe both times, and gloo
carries it between processes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

ProcessGroup: Any = dist.ProcessGroup
"""Base class of the group. The types of its methods differ between releases of torch."""
NAME = "host_memory"
"""Name of the backend in torch."""
POLL_SECONDS = 0.05
"""Seconds between two checks for a failure of another transfer while `wait` blocks."""
CLOSE_SECONDS = 2.0
"""Seconds that a group may take, after it was left, to send what its peers are waiting for."""
NO_TIMEOUT = timedelta(0)
SUMMABLE_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""Dtypes that gloo can add."""

longest_delay = 0.0
"""Maximum number of seconds by which a transfer is delayed at random; for tests."""


def _announce_reduction(numbers: Tensor) -> None:
    """Show tools that watch operators that a reduction of this tensor begins.

    torch does this for its own groups, but not for a group written in Python.
    """


for _name in ("allreduce_", "reduce_scatter_"):  # the names that torch gives its own operators
    torch.library.define(f"shardwise::{_name}", "(Tensor numbers) -> ()")
    torch.library.impl(f"shardwise::{_name}", "default", _announce_reduction)


class Failure:
    """The first error in the groups of this process. When one peer is gone, no group can continue."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            raise RuntimeError(f"{NAME}: {self.error}") from self.error


@dataclass
class Transfer:
    """One collective or message of this rank."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    send: Callable[[list[Tensor], list[Tensor]], None]
    """Send copies of the inputs and fill copies of the outputs, all in host memory.

    An output that is also an input has only one copy.
    """
    delay: float = field(default_factory=lambda: random.uniform(0.0, longest_delay))
    inputs_ready: Any = None
    """When the inputs are ready: an event of the caller's stream. On the CPU, copies of the inputs."""
    end: torch.cuda.Event | None = None
    """Event that says when the outputs are ready, or when the inputs were read if there are no outputs. It is
    set before `done`.
    """
    done: threading.Event = field(default_factory=threading.Event)
    future: Future[list[Tensor]] = field(default_factory=Future)


class TransferQueue:
    """A queue of transfers that a thread runs one after the other.

    This class is for tensors in host memory. It has no streams and can be tested on any machine.
    """

    device = torch.device("cpu")

    def __init__(self, name: str, failure: Failure) -> None:
        self._failure, self._closed = failure, False
        self._pending: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # autograd runs backward in other threads
        self._thread = threading.Thread(target=self._work, name=f"{NAME} {name}", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def start(self, transfer: Transfer) -> TransferWork:
        """Put a transfer into the queue."""
        for tensor in (*transfer.inputs, *transfer.outputs):
            _check(tensor, self.device)
        with self._lock:
            self._failure.check()
            self._save_inputs(transfer)
            self._pending.put(transfer)
        return TransferWork(self._failure, transfer)

    def close(self) -> None:
        """End the thread. Unless something failed, queued transfers get a little time to end."""
        self._pending.put(None)
        if self._failure.error is None:
            self._thread.join(CLOSE_SECONDS)
        self._closed = True

    def _save_inputs(self, transfer: Transfer) -> None:
        """Save the values that are to be sent."""
        transfer.inputs_ready = [tensor.clone() for tensor in transfer.inputs]

    def _run(self, transfer: Transfer) -> None:
        """Run one transfer from its inputs to its outputs."""
        inputs = transfer.inputs_ready
        outputs = _copies(transfer, inputs, torch.empty_like)
        transfer.send(inputs, outputs)
        for tensor, copy in zip(transfer.outputs, outputs, strict=True):
            tensor.data.copy_(copy)
        transfer.future.set_result(transfer.outputs)

    def _work(self) -> None:
        """Run transfers until the queue is closed. Keep no reference to a transfer that has ended."""
        while (transfer := self._pending.get()) is not None and not self._closed:
            try:
                self._failure.check()
                time.sleep(transfer.delay)
                with torch.no_grad():
                    self._run(transfer)
            except Exception as error:
                if self._failure.error is None and not self._closed:
                    self._failure.error = error
                if not transfer.future.done():
                    transfer.future.set_exception(error)  # type: ignore[arg-type]
            transfer.done.set()
            del transfer


class GpuTransferQueue(TransferQueue):
    """A queue of transfers from and to a GPU, on a stream of its own."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        super().__init__(name, failure)

    def _save_inputs(self, transfer: Transfer) -> None:
        transfer.inputs_ready = torch.cuda.current_stream(self.device).record_event()
        transfer.future = Future(devices=[self.device])
        for tensor in (*transfer.inputs, *transfer.outputs):
            # The memory is not reused before this stream has used it, even if the caller frees the tensor.
            tensor.record_stream(self._stream)

    def _run(self, transfer: Transfer) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.inputs_ready)
            inputs = [_pinned(tensor).copy_(tensor.data, non_blocking=True) for tensor in transfer.inputs]
            read = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            read.record(self._stream)
            read.synchronize()
            if transfer.inputs and not transfer.outputs:  # the sender of a message need not wait any longer
                self._finish(transfer, read)
            outputs = _copies(transfer, inputs, _pinned)
            transfer.send(inputs, outputs)
            for tensor, copy in zip(transfer.outputs, outputs, strict=True):
                # As with NCCL, autograd does not count this as a change of the tensor, hence `data`.
                tensor.data.copy_(copy, non_blocking=True)
            if not transfer.done.is_set():
                self._finish(transfer, self._stream.record_event())

    def _finish(self, transfer: Transfer, end: torch.cuda.Event) -> None:
        transfer.end = end
        transfer.future.set_result(transfer.outputs)
        transfer.done.set()


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _copies(transfer: Transfer, inputs: Sequence[Tensor], make: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return host copies of the outputs. An output that is also an input shares the input's copy."""
    known = {id(tensor): copy for tensor, copy in zip(transfer.inputs, inputs, strict=True)}
    return [known[id(tensor)] if id(tensor) in known else make(tensor) for tensor in transfer.outputs]


def _check(tensor: Tensor, device: torch.device) -> None:
    """Raise an error for tensors that NCCL would refuse too."""
    if tensor.device != device:
        raise ValueError(f"{NAME}: a tensor is on {tensor.device}, and this group's are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{NAME}: tensors must be contiguous")


class TransferWork(dist.Work):
    """Handle of a transfer that was started."""

    def __init__(self, failure: Failure, transfer: Transfer) -> None:
        super().__init__()
        self._failure, self._transfer = failure, transfer

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the transfer has ended. On a GPU, let the current stream continue after it."""
        while not self._transfer.done.wait(POLL_SECONDS):
            self._failure.check()
        self._failure.check()
        if self._transfer.end is not None:
            torch.cuda.current_stream().wait_event(self._transfer.end)
        return True

    def is_completed(self) -> bool:
        """Return whether the transfer has ended."""
        return self._transfer.done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        """Return the future of the transfer's outputs."""
        return self._transfer.future


class HostMemoryGroup(ProcessGroup):  # type: ignore[misc]
    """The process group. torch finds it by name (`register`) and calls it as it would call NCCL's.

    torch 2.13 has new names for some collectives. The group has methods of both names.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        make_queue: Callable[[str, Failure], TransferQueue] = TransferQueue,
    ) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._make_queue, self._failure = make_queue, _failure_of_team[0]
        self._queues: dict[str, TransferQueue] = {}
        self._name, self._text = "", ""
        self._messages: dict[str, int] = {}
        """Number of messages so far, by direction and peer."""

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend; called by torch's C++ code."""
        return NAME

    def name(self) -> str:
        """Return the name of the backend; called by torch's Python code."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._text = text

    @property
    def group_name(self) -> str:
        """Name that torch gave this group. torch's own groups keep it in their backends."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description that torch gave this group."""
        return self._text

    def shutdown(self) -> None:
        """Close the queues and the connections to the peers."""
        for transfer_queue in self._queues.values():
            transfer_queue.close()
        self._queues, self._gloo = {}, None

    abort = shutdown

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: object = None, *rest: object) -> dist.Work:
        """Sum tensors over all ranks in place, or reduce them by another operation."""
        operation = _operation(opts)
        for tensor in tensors:
            if tensor.dtype not in SUMMABLE_DTYPES:
                raise NotImplementedError(f"{NAME}: allreduce of {tensor.dtype}")
            torch.ops.shardwise.allreduce_(tensor.detach())

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for tensor in arriving:
                if tensor.numel():
                    self._gloo.allreduce([tensor.view(-1)], operation).wait()

        return self._collective(tensors, tensors, send)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """Copy one rank's tensors to all ranks."""
        root = opts.rootRank

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for tensor in arriving:
                if tensor.numel():
                    self._gloo.broadcast(_bytes(tensor), root).wait()

        return self._collective(tensors, tensors, send)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> dist.Work:
        """Gather a tensor of each rank on all ranks, each into a tensor of its own."""
        if len(inputs) != 1:
            raise NotImplementedError(f"{NAME}: allgather of {len(inputs)} tensors at once")

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            if leaving[0].numel():
                self._gloo.allgather([[_bytes(tensor) for tensor in arriving]], [_bytes(leaving[0])]).wait()

        return self._collective(inputs, outputs[0], send)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Gather several tensors of each rank on all ranks, each into one output tensor."""

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            for part, gathered in zip(leaving, arriving, strict=True):
                if part.numel():
                    self._gloo.allgather([list(_bytes(gathered).chunk(self.size()))], [_bytes(part)]).wait()

        return self._collective(inputs, outputs, send)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, part: Tensor, opts: object = None) -> dist.Work:
        """Gather a tensor of each rank on all ranks, into one output tensor."""
        return self.all_gather_single_coalesced([output], [part])

    _allgather_base = all_gather_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """Sum over all ranks the parts that are for this rank. Each input has one part for each rank.

        The parts are added in the order of the ranks.
        """
        if not _operation(opts) == dist.ReduceOp.SUM:  # torch's ReduceOp does not define `!=`
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

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, opts: object = None) -> dist.Work:
        """Sum over all ranks the part of one tensor that is for this rank."""
        return self.reduce_scatter_single_coalesced([output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], opts: object = None
    ) -> dist.Work:
        """Send rows to the ranks in order. If `sent` is empty, each rank gets the same number of rows."""
        sample = rows if rows.shape[0] else output
        row_bytes = sample.element_size() * sample[:1].numel()
        coming, going = ([count * row_bytes for count in counts] for counts in (received, sent))

        def send(leaving: list[Tensor], arriving: list[Tensor]) -> None:
            self._gloo.alltoall_base(_bytes(arriving[0]), _bytes(leaving[0]), coming, going).wait()

        return self._collective([rows], [output], send)

    alltoall_base = all_to_all_single

    def barrier(self, opts: object = None, *rest: object) -> dist.Work:
        """Wait until all ranks have called this, and the earlier work of their streams is done."""
        return self._collective([], [], lambda leaving, arriving: self._gloo.barrier().wait())

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """Send a tensor to one rank. The sender need not wait until it has arrived."""
        return self._message(
            f"to {to}", tensors, [], lambda leaving, number: self._gloo.send(leaving, to, number).wait()
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor from one rank."""
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

        return self._queue(way).start(Transfer(inputs, outputs, send))

    def _collective(
        self, inputs: list[Tensor], outputs: list[Tensor], send: Callable[[list[Tensor], list[Tensor]], None]
    ) -> dist.Work:
        return self._queue("collectives").start(Transfer(list(inputs), list(outputs), send))

    def _queue(self, name: str) -> TransferQueue:
        if name not in self._queues:
            if self._gloo is None:
                raise RuntimeError(f"{NAME}: this group was left")
            self._queues[name] = self._make_queue(name, self._failure)
        return self._queues[name]


_failure_of_team = [Failure()]
"""The failure of the team that this process is in."""


def register() -> None:
    """Register the group with torch under `NAME`, for a new team."""
    _failure_of_team[0] = Failure()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cuda"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> HostMemoryGroup:
    return HostMemoryGroup(store, rank, size, timeout, GpuTransferQueue)


def _not_implemented(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error which names the missing collective."""

    def call(self: HostMemoryGroup, *arguments: object, **more: object) -> NoReturn:
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
    setattr(HostMemoryGroup, _name, _not_implemented(_name))


def _operation(opts: object) -> object:
    """Return the reduction that options ask for: a field of them, the options themselves, or a sum by
    default.
    """
    operation: object = getattr(opts, "reduceOp", opts)
    known = dist.ReduceOp
    if operation is None:
        return known.SUM
    if not any(operation == each for each in (known.SUM, known.MAX, known.MIN, known.PRODUCT)):
        raise NotImplementedError(f"{NAME}: a sum with {operation}")
    return operation


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, because gloo does not know all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
