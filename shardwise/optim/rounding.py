"""Weights and states that are stored in bfloat16: updated in float32, then rounded by chance.

bfloat16 has eight bits. The neighbours of 1.0 are 0.9961 and 1.0078, so an update of the size of a learning
rate, rounded to the nearest, is no update: the weights of norms would stay 1 for ever, and every weight once
the learning rate has fallen far enough; a second moment with beta2 = 0.999 would never fall. Rounded up with
a probability that is the share of the way to the upper neighbour, a number is right on average, and small
updates add up (Gupta et al. 2015).

What chance decides depends on (seed, name, step, place of the element in the whole weight) and on nothing
else: a hash of these four. So copies of a weight stay equal to the bit, every layout rounds alike, and a
resumed run as one that never stopped.

States stay as small as they are asked to be. Where an optimizer has a GPU kernel for it, an update is one
pass over memory (AdamW: 14 bytes a parameter). Else float32 copies of CHUNK elements are held at a time, and
torch's operators pass over some 500 bytes a parameter, most of them for the hash.
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
"""Elements that are updated at a time by torch's operators."""
_WORD = (1 << 32) - 1
Slices = tuple[slice, ...]


class Rounding:
    """Where the elements of this rank's parameters are in the whole model, by which their rounding is
    drawn."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], held: Mapping[nn.Parameter, Slices], seed: int
    ) -> None:
        """`held` is this rank's slice of each parameter, `names` are as the whole model has them."""
        self._widths = {parameter: _width(parameter, held[parameter]) for parameter in names}
        self._places = {
            parameter: _place(parameter, held[parameter], _key(seed, name))
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
        """Make one step of these pieces in place; change nothing where `skip` is 1."""
        steps = [piece.step for piece in pieces]
        torch._foreach_add_(steps, 1 - skip)
        done = torch.stack(steps).clamp(min=1)
        places = self._drawn(pieces, done)
        kernel = settings.rounding_kernel(pieces[0].weight.device.type)
        if kernel is not None:
            self._update_by_kernel(kernel, pieces, places, decay, _numbers(kernel, done, lr, divide_by, skip))
            return
        for piece, step, place in zip(pieces, done.double(), places, strict=True):
            for block in self._blocks(piece, place):
                block.update(settings, decay, lr, divide_by, skip, step)

    def _drawn(self, pieces: Sequence[Piece], done: Tensor) -> Tensor:
        """Return for each piece what all of its elements share: a hash of key and step, where its first
        element is, and how long a row of the whole parameter is."""
        key, *where = torch.stack([self._places[piece.parameter] for piece in pieces]).unbind(1)
        drawn = _hash((done.long() * 0x9E3779B1 + key) & _WORD)
        return torch.stack([drawn, *where], 1)

    def _update_by_kernel(
        self, kernel: RoundingKernel, pieces: Sequence[Piece], places: Tensor, decay: float, numbers: Tensor
    ) -> None:
        for piece, number, place in zip(pieces, numbers, places, strict=True):
            kernel.update(*self._as_rows(piece), number, place, decay)

    def _as_rows(self, piece: Piece) -> tuple[Tensor, ...]:
        """Return (weight, gradient, slots…) as (rows, columns), a row being what lies side by side in the
        whole parameter."""
        shape = (-1, max(1, self._widths[piece.parameter] or piece.weight.numel()))
        slots = (slot.view(shape) for slot in piece.slots)
        return piece.weight.view(shape), piece.gradient.reshape(shape), *slots

    def _blocks(self, piece: Piece, place: Tensor) -> list[_Block]:
        tensors = self._as_rows(piece)
        rows, columns = tensors[0].shape
        height, width = max(1, CHUNK // columns), min(columns, CHUNK)
        corners = [(top, left) for top in range(0, rows, height) for left in range(0, columns, width)]
        return [
            _Block(
                *(tensor[top : top + height, left : left + width] for tensor in tensors),
                top=top,
                left=left,
                place=place,
            )
            for top, left in corners
        ]


class _Block:
    """Some rows and columns of a parameter that are updated at a time; the first is at (top, left) of this
    rank's piece."""

    def __init__(
        self, weight: Tensor, gradient: Tensor, *slots: Tensor, top: int, left: int, place: Tensor
    ) -> None:
        self.weight, self.gradient, self.slots = weight, gradient, slots
        self.top, self.left, self.place = top, left, place

    def update(
        self, settings: Optimizer, decay: float, lr: float, divide_by: Tensor, skip: Tensor, step: Tensor
    ) -> None:
        """Update in float32, and round to bfloat16. All slots are rounded by the same chance."""
        gradient = self.gradient.float() / divide_by
        slots = [slot.float() for slot in self.slots]
        weight, new = settings.update(self.weight.float(), gradient, slots, lr=lr, decay=decay, step=step)
        bits = _draw(self.top, self.left, self.weight.shape, self.place)
        chances = (bits & 0xFFFF, *[bits >> 16] * len(new))
        for state, number, chance in zip((self.weight, *self.slots), (weight, *new), chances, strict=True):
            state.copy_(torch.where(skip > 0, state, round_by_chance(number, chance)))


def _numbers(kernel: RoundingKernel, done: Tensor, lr: float, divide_by: Tensor, skip: Tensor) -> Tensor:
    """Return for each parameter the scalars that a kernel takes, computed once for all of them."""
    one = torch.ones_like(done)
    return torch.stack([lr * one, one * divide_by, one * skip, *kernel.numbers(done)], 1)


def round_by_chance(numbers: Tensor, chance: Tensor) -> Tensor:
    """Return float32 numbers as bfloat16; `chance` is from 0 to 65535. bfloat16 is the upper half of a
    float32's bits, so adding the chance to the lower half carries into the upper one as often as the lower
    half is large."""
    return (
        ((numbers.view(torch.int32) + chance.to(torch.int32)) & -0x10000)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def _draw(top: int, left: int, shape: torch.Size, place: Tensor) -> Tensor:
    """Return 32 bits for each element of a block that begins there among this rank's rows and columns, by
    their places in the whole parameter."""
    drawn, offset, whole_row = place.unbind()
    row, column = (torch.arange(count, device=place.device) for count in shape)
    there = ((row + top) * whole_row + offset + left)[:, None] + column
    return _hash((there & _WORD) ^ drawn)


def _hash(words: Tensor) -> Tensor:
    """Return 32 bits for 32 bits, such that every bit depends on all of them. In int64, where no product
    overflows."""
    for _ in range(2):
        words = ((words >> 16) ^ words) * 0x45D9F3B & _WORD
    return (words >> 16) ^ words


def _width(parameter: Tensor, held: Slices) -> int | None:
    """Return how many of this rank's elements lie side by side in the whole parameter: None for all of them,
    or where the second dim is split (none but the first two ever are) a row's. In one long row a GPU finds an
    element's place without dividing."""
    if len(held) < 2 or held[1].stop - held[1].start == parameter.shape[1]:
        return None
    return int(held[1].stop - held[1].start) * prod(parameter.shape[2:])


def _place(parameter: Tensor, held: Slices, key: int) -> Tensor:
    """Return where this rank's elements are in the whole parameter: (key, place of the first element, length
    of a row of the whole)."""
    rows, columns = (*held, slice(0, 1), slice(0, 1))[:2]
    width, inner = (*parameter.shape, 1, 1)[1], prod(parameter.shape[2:])
    numbers = [key, rows.start * width * inner + columns.start * inner, width * inner]
    return torch.tensor(numbers, device=parameter.device)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little")
