"""AdamW for weights and moments that are stored in bfloat16: updated in float32, then rounded by chance.

bfloat16 has eight bits. The neighbours of 1.0 are 0.9961 and 1.0078, so an update of the size of a learning rate, rounded to the
nearest, is no update: the weights of norms would stay 1 for ever, and every weight once the learning rate has fallen far enough;
a second moment with beta2 = 0.999 would never fall. Rounded up with a probability that is the share of the way to the upper
neighbour, a number is right on average, and small updates add up (Gupta et al. 2015).

What chance decides depends on (seed, name, step, place of the element in the whole weight) and on nothing else: a hash of these
four. So copies of a weight stay equal to the bit, every layout rounds alike, and a resumed run as one that never stopped.

States stay as small as they are asked to be. Compiled, as on GPUs, an update is one pass over 14 bytes a parameter. Without a
compiler it holds float32 copies of CHUNK elements at a time and passes over some 500 bytes a parameter, most of them for the
hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import LocalAdamW

CHUNK = 1 << 22
"""Elements that are updated at a time."""
_WORD = (1 << 32) - 1
Slices = tuple[slice, ...]


class RoundedAdamW(LocalAdamW):
    """AdamW on bfloat16 states; `held` is this rank's slice of each parameter, `names` are as the whole model has them."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        held: Mapping[nn.Parameter, Slices],
        seed: int,
        compiled: bool,
        **more: Any,
    ) -> None:
        super().__init__(groups, **more)
        self._rows = {parameter: _row(parameter, held[parameter]) for parameter in names}
        self._places = {parameter: _place(parameter, held[parameter], _key(seed, name)) for parameter, name in names.items()}
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True) if compiled else _update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, divided by `grad_scale`; none where `found_inf` is 1."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            constants = (*group["betas"], group["eps"], group["weight_decay"])
            for parameter, (weight, gradient, first, second, steps) in self.pieces(group):
                number = torch.ones_like(steps)
                skip, divide_by = getattr(self, "found_inf", 0 * number), getattr(self, "grad_scale", number)
                steps += 1 - skip
                numbers = torch.stack((group["lr"] * number, divide_by, skip, steps.clamp(min=1)))
                length = self._rows[parameter]
                rows = (weight.view(-1, length), gradient.reshape(-1, length), first.view(-1, length), second.view(-1, length))
                at_once = max(1, CHUNK // length)
                for start in range(0, len(rows[0]), at_once):
                    chunk = (tensor[start : start + at_once] for tensor in rows)
                    self._update(*chunk, start, numbers, self._places[parameter], *constants)


def _update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    start: int,
    numbers: Tensor,
    place: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """AdamW on some rows, in float32, and back to bfloat16. What changes from step to step is in `numbers`, what differs between
    parameters in `place`, as tensors: so there is one compiled kernel."""
    lr, divide_by, skip, steps = numbers.unbind()
    g = gradient.float() / divide_by
    m = beta1 * first.float() + (1 - beta1) * g
    v = beta2 * second.float() + (1 - beta2) * g * g
    size = m / (1 - beta1**steps) / ((v / (1 - beta2**steps)).sqrt() + epsilon)
    w = weight.float() * (1 - lr * decay) - lr * size
    drawn = _draw(start, weight.shape[0], weight.shape[1], steps, place)
    for state, number, chance in ((weight, w, drawn & 0xFFFF), (first, m, drawn >> 16), (second, v, drawn >> 16)):
        state.copy_(torch.where(skip > 0, state, round_by_chance(number, chance)))


def round_by_chance(numbers: Tensor, chance: Tensor) -> Tensor:
    """float32 to bfloat16; `chance` is from 0 to 65535. bfloat16 is the upper half of a float32's bits, so adding the chance to
    the lower half carries into the upper one as often as the lower half is large."""
    return ((numbers.view(torch.int32) + chance.to(torch.int32)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _draw(start: int, rows: int, length: int, steps: Tensor, place: Tensor) -> Tensor:
    """32 bits for each element of some rows of this rank, from row `start` on, by their places in the whole parameter and the
    step. By rows and columns: to divide a place by the length of a row would cost a GPU more than all the rest."""
    key, offset, whole_row = place.unbind()
    row, column = (torch.arange(count, device=place.device) for count in (rows, length))
    there = ((row + start) * whole_row + offset)[:, None] + column
    return _hash((there & _WORD) ^ _hash((steps.long() * 0x9E3779B1 + key) & _WORD))


def _hash(words: Tensor) -> Tensor:
    """32 bits to 32 bits in which every bit depends on all of them. In int64, where no product overflows."""
    for _ in range(2):
        words = ((words >> 16) ^ words) * 0x45D9F3B & _WORD
    return (words >> 16) ^ words


def _row(parameter: Tensor, held: Slices) -> int:
    """How many elements a row has here: all dims but the first, of which only the second is ever split."""
    columns = (*held, slice(0, 1), slice(0, 1))[1]
    return max(1, int(columns.stop - columns.start) * prod(parameter.shape[2:]))


def _place(parameter: Tensor, held: Slices, key: int) -> Tensor:
    """Where this rank's elements are in the whole parameter: (key, place of the first element, length of a row of the whole)."""
    rows, columns = (*held, slice(0, 1), slice(0, 1))[:2]
    width, inner = (*parameter.shape, 1, 1)[1], prod(parameter.shape[2:])
    numbers = [key, rows.start * width * inner + columns.start * inner, width * inner]
    return torch.tensor(numbers, device=parameter.device)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little")
