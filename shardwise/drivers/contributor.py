"""A worker of a parameter server: asks for a portion of the data, pulls the weights, and pushes its gradient,
at its own pace.

It has one device and a whole model. Its state need not be saved: when it is lost, its portion goes to another
worker, and a new worker begins by pulling the weights. When the servers are gone, it waits for the next ones.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from shardwise.asynchronous import messages
from shardwise.asynchronous.wire import Wire, dial
from shardwise.config import Config, Layout
from shardwise.data import Dataset
from shardwise.data.batches import Batch, split_evenly, to_batch
from shardwise.drivers.contributions import credentials, digest
from shardwise.drivers.server_settings import server_settings
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker, open_team_store
from shardwise.models import attention_backends
from shardwise.models.torch_dtypes import DTYPES
from shardwise.plans import choose
from shardwise.resilience.channel import UntrustedMessage
from shardwise.resilience.worker_link import WorkerLink
from shardwise.train.build import Training, build

log = logging.getLogger("shardwise")

RETRY_SECONDS = 0.5
"""Seconds that a worker waits after its servers are gone, before it looks for the next ones."""
MEET_SECONDS = 60.0
"""Seconds in which the servers must publish their addresses."""


class Contributor:
    """A worker of a parameter server, which keeps its model while teams of servers come and go."""

    def __init__(self, config: Config, worker: Worker, dataset: Dataset) -> None:
        self._config, self._training = config, _build_alone(config, worker, dataset)

    def work(self, worker: Worker, ranks: int, link: WorkerLink) -> bool:
        """Compute portions for this many servers. Return True if the run is done, and False if the servers
        are gone or this worker is asked to stop."""
        wires: list[Wire] = []
        try:
            for rank in range(ranks):
                store = open_team_store(worker, timedelta(seconds=MEET_SECONDS))
                address, _, port = store.get(f"listener {rank}").decode().rpartition(" ")
                wires.append(dial(address, int(port), credentials(worker)))
            return _Connected(self._training, self._config, wires, worker).work(link)
        except (OSError, EOFError, UntrustedMessage, torch.distributed.DistError) as error:
            log.warning("let go of the servers: %s", error)
            time.sleep(RETRY_SECONDS)
            return False
        finally:
            for wire in wires:
                wire.close()


def _build_alone(config: Config, worker: Worker, dataset: Dataset) -> Training:
    """Build the model on this device alone."""
    layout = Layout(data=1)  # type: ignore[call-arg]
    alone = config.model_copy(
        update={"layout": layout, "train": config.train.model_copy(update={"driver": "synchronous"})}
    )
    only_worker = replace(worker, rank=0, world=1)
    return build(alone, choose(alone, 1), only_worker, dataset, draw=False)  # weights come from the servers


class _Connected:
    """A worker that is connected to its servers."""

    def __init__(self, training: Training, config: Config, wires: Sequence[Wire], worker: Worker) -> None:
        self.training, self.config, self.wires = training, config, wires
        self.parameters = dict(training.parallel.named_parameters(once=True))
        dtype = next(iter(self.parameters.values())).dtype
        name = f"{socket.gethostname()[:200]}-{worker.local_rank}-{time.monotonic_ns():x}"
        self.slices = [self._greet(wire, name) for wire in wires]
        self.buffers = [torch.empty(_numbers(slices), dtype=dtype) for slices in self.slices]
        self.codec = server_settings(config).codec
        self.feeds_back = self.codec is not None and self.codec.shrinks_errors
        self.left_out = [torch.zeros_like(buffer) for buffer in self.buffers] if self.feeds_back else []
        self.versions = [-1] * len(wires)
        """Version of the weights that each server sent last."""

    def work(self, link: WorkerLink) -> bool:
        """Compute portions until there are no more (return True), or the worker is asked to stop (return
        False)."""
        count = 0
        while True:
            match _answer(self.wires[0], messages.Ask()):
                case messages.Task(portion, version):
                    self._pull(version)
                    self._compute(portion)
                    count += 1
                    link.progress("step", count)
                case messages.Wait():
                    link.progress("wait", count)
                case messages.End():
                    return True
                case other:
                    raise UntrustedMessage(f"{other} in answer to a worker that asks")
            if link.wish() is not None:
                return False

    def _greet(self, wire: Wire, name: str) -> dict[str, tuple[slice, ...]]:
        welcome = _answer(wire, messages.Hello(name))
        if not isinstance(welcome, messages.Welcome) or welcome.slices.keys() != self.parameters.keys():
            raise UntrustedMessage("a server of another model")
        if welcome.job != digest(self.config):
            raise UserError(
                "this worker was started with another job than its servers: give every node the same job and "
                "overrides"
            )
        self.rows = welcome.rows
        return {name: tuple(slice(*part) for part in where) for name, where in welcome.slices.items()}

    @torch.no_grad()
    def _pull(self, least: int) -> None:
        for server, (wire, slices, buffer) in enumerate(
            zip(self.wires, self.slices, self.buffers, strict=True)
        ):
            wire.send(messages.to_json(messages.Pull(least, self.versions[server])))
            text, behind = wire.receive()
            answer = messages.from_json(text)
            if not isinstance(answer, messages.Weights) or behind not in (
                0,
                buffer.numel() * buffer.element_size(),
            ):
                raise UntrustedMessage(f"{answer} with {behind} bytes in answer to a worker that pulls")
            if behind:
                wire.read(buffer)
                for name, part in _views(buffer, slices):
                    self.parameters[name][slices[name]].copy_(part)
            self.versions[server] = answer.version

    def _compute(self, portion: int) -> None:
        training, batch = self.training, self._batch(portion)
        loss = summed_loss(training, batch)
        before = [left_out.clone() for left_out in self.left_out]
        for server, (wire, slices, buffer) in enumerate(
            zip(self.wires, self.slices, self.buffers, strict=True)
        ):
            for name, part in _views(buffer, slices):
                gradient = self.parameters[name].grad
                part.copy_(gradient[slices[name]]) if gradient is not None else part.zero_()
            wire.send(messages.to_json(messages.Push(portion)), self._encoded(server, portion))
        for wire in self.wires:
            if not isinstance(_received(wire), messages.Stored):
                raise UntrustedMessage("no answer to a worker that pushes")
        noted = _answer(self.wires[0], brought(training, portion, loss, batch))
        if not isinstance(noted, messages.Noted):
            raise UntrustedMessage("no answer to a worker that brings")
        if not noted.counts:  # this gradient included the earlier residual, which must not be lost
            self.left_out = before

    def _batch(self, portion: int) -> list[Batch]:
        try:
            return batch_of(self.training, portion, self.rows)
        except OSError as error:  # other servers would not help
            raise RunFailed(f"the data of portion {portion} cannot be read: {error}") from error

    def _encoded(self, server: int, portion: int) -> Tensor:
        """Return the encoded gradient in this server's buffer. With error feedback, what encoding leaves out
        is added to the next gradient."""
        buffer = self.buffers[server]
        if self.codec is None:
            return buffer
        if self.feeds_back:
            buffer = self.left_out[server].add_(buffer)
        return self.codec.encode(buffer.unsqueeze(0), seed=portion, subtract=self.feeds_back)


def batch_of(training: Training, portion: int, size: int) -> list[Batch]:
    """Return the micro-batches of a portion of `size` rows."""
    train, dataset = training.config.train, training.text
    count = -(-size // (train.micro_batch or size))
    parts = [(portion * size + part.start, len(part)) for part in split_evenly(size, count)]
    return [
        replace(to_batch(dataset.sequences(first, rows), training.mesh.device), first=first)
        for first, rows in parts
    ]


def summed_loss(training: Training, batch: Sequence[Batch]) -> float:
    """Compute the gradient of a portion, and return its loss, summed over its items."""
    dtype = DTYPES[training.plan.model.dtypes.sums]
    training.optimizer.zero_grad(set_to_none=not training.parallel.keeps_gradients)
    with attention_backends(training.mesh.device.type):
        return float(
            training.parallel.forward_backward(
                batch, torch.ones((), dtype=dtype, device=training.mesh.device)
            )
        )


def brought(training: Training, portion: int, loss: float, batch: Sequence[Batch]) -> messages.Bring:
    """Return a worker's report of a portion."""
    return messages.Bring(
        portion,
        loss,
        items=sum(float(training.parallel.items(micro_batch)) for micro_batch in batch),
        tokens=sum(micro_batch.valid for micro_batch in batch),
        checksum=sum(micro_batch.checksum for micro_batch in batch),
    )


def _views(buffer: Tensor, slices: dict[str, tuple[slice, ...]]) -> list[tuple[str, Tensor]]:
    """Return the parts of a flat buffer, each in the shape of its slice."""
    shapes = {name: [part.stop - part.start for part in where] for name, where in slices.items()}
    pieces = torch.split(buffer, [math.prod(shape) for shape in shapes.values()])
    return [(name, piece.view(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)]


def _numbers(slices: dict[str, tuple[slice, ...]]) -> int:
    return sum(math.prod(part.stop - part.start for part in where) for where in slices.values())


def _answer(wire: Wire, message: messages.FromWorker) -> messages.Message:
    """Send a message and return the answer."""
    wire.send(messages.to_json(message))
    return _received(wire)


def _received(wire: Wire) -> messages.Message:
    text, behind = wire.receive()
    if behind:
        raise UntrustedMessage(f"{behind} bytes behind {text}")
    return messages.from_json(text)
