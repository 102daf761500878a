"""Stochastic rounding: weights and states in bfloat16 are updated in float32, then rounded up or down at
random.

bfloat16 has eight significant bits. The neighbours of 1.0 are 0.9961 and 1.0078, so rounding to the nearest
loses an update of the size of a learning rate: the weights of norms would stay 1 forever, every weight would
stop changing once the learning rate is small enough, and a second moment with beta2 = 0.999 would never fall.
Instead, a number is rounded up with a probability equal to its distance from the lower neighbour, relative to
the distance of the two neighbours. Then the expected value is the number itself, and small updates add up
(Gupta et al. 2015).

The random bits are a hash of (seed, name, step, index of the element in the whole weight) and depend on
nothing else. So copies of a weight stay bitwise equal, every layout rounds alike, and a resumed run rounds
like one that never stopped.

States stay in bfloat16. Where an optimizer has a GPU kernel for it, an update is one pass over memory (AdamW:
14 bytes per parameter). Otherwise float32 copies of CHUNK elements exist at a time, and torch's operators
read and write about 500 bytes per parameter, most of them for the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from shardwise.optim.pieces import Piece
from shardwise.optimizers import Optimizer, RoundingKernel

CHUNK = 1 << 22
"""Number of elements that torch's operators update at a time."""
_WORD = (1 << 32) - 1
Slices = tuple[slice, ...]


class Rounding:
    """Updates this rank's bfloat16 parameters. The random bits depend on the index of each element in its
    whole parameter."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], slices: Mapping[nn.Parameter, Slices], seed: int
    ) -> None:
        """`slices` is this rank's slice of each parameter, and `names` its name in the whole model."""
        self._widths = {parameter: _width(parameter, slices[parameter]) for parameter in names}
        self._places = {
            parameter: _place(parameter, slices[parameter], _key(seed, name))
            for parameter, name in names.items()
        }

    def update(
        self,
        settings: Optimizer,
        pieces: Sequence[Piece],
        decay: float,
        lr: float,
        divide_by: Tensor,
        skip: Tensor,
    ) -> None:
        """Make one step of these pieces in place; change nothing if `skip` is 1."""
        steps = [piece.step for piece in pieces]
        torch._foreach_add_(steps, 1 - skip)
        done = torch.stack(steps).clamp(min=1)
        places = self._step_places(pieces, done)
        kernel = settings.rounding_kernel(pieces[0].weight.device.type)
        if kernel is not None:
            self._update_by_kernel(kernel, pieces, places, decay, _scalars(kernel, done, lr, divide_by, skip))
            return
        counts = done.double().cpu() if settings.reads_step else done.double()
        for piece, step, place in zip(pieces, counts, places, strict=True):
            numbers: Sequence[Tensor] = piece.scalars
            for block in self._blocks(piece, place):
                numbers = block.update(settings, piece.scalars, decay, lr, divide_by, skip, step)
            for number, new in zip(piece.scalars, numbers, strict=True):
                number.copy_(torch.where(skip > 0, number, new))

    def _step_places(self, pieces: Sequence[Piece], done: Tensor) -> Tensor:
        """Return for each piece a hash of key and step, the index of its first element in the whole
        parameter, and the length of a row there: (pieces, 3)."""
        key, *where = torch.stack([self._places[piece.parameter] for piece in pieces]).unbind(1)
        hashed = _hash((done.long() * 0x9E3779B1 + key) & _WORD)
        return torch.stack([hashed, *where], 1)

    def _update_by_kernel(
        self, kernel: RoundingKernel, pieces: Sequence[Piece], places: Tensor, decay: float, scalars: Tensor
    ) -> None:
        for piece, values, place in zip(pieces, scalars, places, strict=True):
            kernel.update(*self._as_rows(piece), values, place, decay)

    def _as_rows(self, piece: Piece) -> tuple[Tensor, ...]:
        """Return (weight, gradient, slots…) as (rows, columns), where a row is contiguous in the whole
        parameter."""
        shape = (-1, max(1, self._widths[piece.parameter] or piece.weight.numel()))
        slots = (slot.view(shape) for slot in piece.slots)
        return piece.weight.view(shape), piece.gradient.reshape(shape), *slots

    def _blocks(self, piece: Piece, place: Tensor) -> list[_Block]:
        tensors = self._as_rows(piece)
        rows, columns = tensors[0].shape
        height, width = max(1, CHUNK // columns), min(columns, CHUNK)
        corners = [(top, left) for top in range(0, rows, height) for left in range(0, columns, width)]
        if piece.scalars and not corners:
            corners = [(0, 0)]  # an empty piece, whose single numbers advance all the same
        blocks = []
        for top, left in corners:
            parts = (tensor[top : top + height, left : left + width] for tensor in tensors)
            blocks.append(_Block(*parts, top=top, left=left, place=place))
        return blocks


class _Block:
    """Rows and columns of a piece that are updated at a time; the first element is at (top, left) of the
    piece."""

    def __init__(
        self, weight: Tensor, gradient: Tensor, *slots: Tensor, top: int, left: int, place: Tensor
    ) -> None:
        self.weight, self.gradient, self.slots = weight, gradient, slots
        self.top, self.left, self.place = top, left, place

    def update(
        self,
        settings: Optimizer,
        scalars: Sequence[Tensor],
        decay: float,
        lr: float,
        divide_by: Tensor,
        skip: Tensor,
        step: Tensor,
    ) -> Sequence[Tensor]:
        """Update in float32, round to bfloat16, and return the new scalars. All slots are rounded with the
        same random bits."""
        gradient = self.gradient.float() / divide_by
        states = [*(_widened(slot) for slot in self.slots), *scalars]
        weight, new = settings.update(self.weight.float(), gradient, states, lr=lr, decay=decay, step=step)
        bits = _random_bits(self.top, self.left, self.weight.shape, self.place)
        slots, numbers = new[: len(self.slots)], new[len(self.slots) :]
        halves = (bits & 0xFFFF, *[bits >> 16] * len(slots))
        for state, values, half in zip((self.weight, *self.slots), (weight, *slots), halves, strict=True):
            rounded = round_stochastically(values, half) if state.dtype == torch.bfloat16 else values
            state.copy_(torch.where(skip > 0, state, rounded))
        return numbers


def _widened(slot: Tensor) -> Tensor:
    return slot.float() if slot.dtype == torch.bfloat16 else slot


def _scalars(kernel: RoundingKernel, done: Tensor, lr: float, divide_by: Tensor, skip: Tensor) -> Tensor:
    """Return for each parameter the scalars that a kernel takes, computed once for all of them."""
    ones = torch.ones_like(done)
    return torch.stack([lr * ones, ones * divide_by, ones * skip, *kernel.numbers(done)], 1)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values as bfloat16; `bits` are random from 0 to 65535. bfloat16 is the upper half of a
    float32's bits, so adding random bits to the lower half carries into the upper one with a probability
    equal to the lower half's share of 65536."""
    carried = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return carried.view(torch.float32).to(torch.bfloat16)


def _random_bits(top: int, left: int, shape: torch.Size, place: Tensor) -> Tensor:
    """Return 32 bits for each element of a block that begins at (top, left) of this rank's piece, from the
    element's index in the whole parameter."""
    hashed, offset, whole_row = place.unbind()
    row, column = (torch.arange(count, device=place.device) for count in shape)
    index = ((row + top) * whole_row + offset + left)[:, None] + column
    return _hash((index & _WORD) ^ hashed)


def _hash(words: Tensor) -> Tensor:
    """Return a 32-bit hash of each 32-bit word, in int64, where no product overflows."""
    for _ in range(2):
        words = ((words >> 16) ^ words) * 0x45D9F3B & _WORD
    return (words >> 16) ^ words


def _width(parameter: Tensor, slices: Slices) -> int | None:
    """Return how many of this rank's elements in a row are contiguous in the whole parameter, or None if all
    are: then the kernel computes an element's index without a division. Only the first two dims are ever
    split."""
    if len(slices) < 2 or slices[1].stop - slices[1].start == parameter.shape[1]:
        return None
    return int(slices[1].stop - slices[1].start) * prod(parameter.shape[2:])


def _place(parameter: Tensor, slices: Slices, key: int) -> Tensor:
    """Return (key, index of this rank's first element in the whole parameter, length of a row there)."""
    rows, columns = (*slices, slice(0, 1), slice(0, 1))[:2]
    width, inner = (*parameter.shape, 1, 1)[1], prod(parameter.shape[2:])
    numbers = [key, rows.start * width * inner + columns.start * inner, width * inner]
    return torch.tensor(numbers, device=parameter.device)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little")
