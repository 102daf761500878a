"""The newest weights and the pushed gradients that one server holds for its workers.

A worker is identified by the name in its `Hello`. When its connection ends, a gradient that it pushed still
counts if the scheduler knows of it. It is dropped when two updates in a row do not list it: the first of
these lists may be older than the worker's last message to the scheduler, the second is not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.asynchronous.wire import Wire
from shardwise.codecs import RowCodec
from shardwise.resilience.channel import UntrustedMessage

Key = tuple[str, int]
"""The worker and the portion of a pushed gradient."""
Slices = Mapping[str, tuple[slice, ...]]
"""The slices of each parameter that a server holds."""


class GradientStore:
    """The weights and the pushed gradients of one server, as flat tensors in the order of its slices."""

    def __init__(self, slices: Slices, dtype: torch.dtype, codec: RowCodec | None = None) -> None:
        """`codec` decodes gradients; None: they are not encoded."""
        self.slices, self.dtype = slices, dtype
        self._codec = codec
        self.numbers = sum(math.prod(part.stop - part.start for part in where) for where in slices.values())
        self._lock = threading.Condition()
        self._version, self._weights = -1, torch.empty(0)
        self._closed = False
        self._gradients: dict[Key, Tensor] = {}
        self._spare: list[Tensor] = []
        self._gone: set[str] = set()
        """Workers whose connections have ended."""
        self._forgotten: set[Key] = set()
        """Gradients of such workers that the last update did not list."""

    def publish(self, version: int, weights: Tensor) -> None:
        """Send these weights to workers from now on. The caller must not change them any more, because they
        may be sent at any later time."""
        with self._lock:
            self._version, self._weights = version, weights
            self._lock.notify_all()

    def weights(self, least: int) -> tuple[int, Tensor]:
        """Return the newest version and its weights. Wait until the version is at least `least`, because
        servers do not reach a version at the same moment."""
        with self._lock:
            self._lock.wait_for(lambda: self._version >= least or self._closed)
            if self._version < least:
                raise EOFError("the server ends")
            return self._version, self._weights

    def close(self) -> None:
        """Raise in all threads that wait for weights."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    @property
    def pushed_bytes(self) -> int:
        """Bytes of a gradient on the wire."""
        plain: int = self.numbers * self.dtype.itemsize
        return plain if self._codec is None else self._codec.wire_bytes(self.numbers)

    def read(self, wire: Wire, portion: int) -> Tensor:
        """Return the gradient of a portion, which follows the message that was just received."""
        gradient = self.new_buffer()
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

    def new_buffer(self) -> Tensor:
        """Return a tensor for a gradient, reused if one is free."""
        with self._lock:
            return self._spare.pop() if self._spare else torch.empty(self.numbers, dtype=self.dtype)

    def put(self, key: Key, gradient: Tensor) -> None:
        """Store the pushed gradient of a worker's portion."""
        with self._lock:
            self._discard(key)
            self._gradients[key] = gradient

    def gone(self, worker: str) -> None:
        """Note that the connection of this worker has ended."""
        with self._lock:
            self._gone.add(worker)

    def take(self, used: Sequence[Key], brought: Iterable[Key], dropped: Iterable[Key]) -> list[Tensor]:
        """Return the gradients of an update in the order of `used`. Call `give_back` when they are summed.

        Gradients in `brought` count in a later update, those in `dropped` never.
        """
        with self._lock:
            for key in dropped:
                self._discard(key)
            taken = [self._gradients.pop(key) for key in used]
            unknown = {key for key in self._gradients if key[0] in self._gone} - set(brought)
            for key in unknown & self._forgotten:
                self._discard(key)
            self._forgotten = unknown - self._forgotten
            self._gone &= {worker for worker, _ in self._gradients}
            return taken

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """Let the memory of gradients that `take` returned be reused."""
        with self._lock:
            self._spare.extend(taken)

    def _discard(self, key: Key) -> None:
        gradient = self._gradients.pop(key, None)
        if gradient is not None:
            self._spare.append(gradient)
