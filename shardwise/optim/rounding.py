"""AdamW for weights and moments that are stored in bfloat16: updated in float32, then rounded by chance.

bfloat16 has eight bits. The neighbours of 1.0 are 0.9961 and 1.0078, so an update of the size of a learning
rate, rounded to the nearest, is no update: the weights of norms would stay 1 for ever, and every weight once
the learning rate has fallen far enough; a second moment with beta2 = 0.999 would never fall. Rounded up with
a probability that is the share of the way to the upper neighbour, a number is right on average, and small
updates add up (Gupta et al. 2015).

What chance decides depends on (seed, name, step, place of the element in the whole weight) and on nothing
else: a hash of these four. So copies of a weight stay equal to the bit, every layout rounds alike, and a
resumed run as one that never stopped.

States stay as small as they are asked to be. On a GPU an update is one pass over 14 bytes a parameter
(optim/kernels.py). A CPU holds float32 copies of CHUNK elements at a time and passes over some 500 bytes a
parameter, most of them for the hash.
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
"""Elements that a CPU updates at a time."""
_WORD = (1 << 32) - 1
Slices = tuple[slice, ...]


class RoundedAdamW(LocalAdamW):
    """AdamW on bfloat16 states; `held` is this rank's slice of each parameter, `names` are as the whole model
    has them."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        held: Mapping[nn.Parameter, Slices],
        seed: int,
        **more: Any,
    ) -> None:
        super().__init__(groups, **more)
        self._widths = {parameter: _width(parameter, held[parameter]) for parameter in names}
        self._places = {
            parameter: _place(parameter, held[parameter], _key(seed, name))
            for parameter, name in names.items()
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, divided by `grad_scale`; none where `found_inf`
        is 1."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            constants = (*group["betas"], group["eps"], group["weight_decay"])
            pieces = list(self.pieces(group))
            if not pieces:
                continue
            numbers, places = self._prepare(
                group, [parameter for parameter, _ in pieces], [states[-1] for _, states in pieces]
            )
            for (parameter, (weight, gradient, first, second, _)), number, place in zip(
                pieces, numbers, places, strict=True
            ):
                shape = (-1, max(1, self._widths[parameter] or weight.numel()))
                rows = (weight.view(shape), gradient.reshape(shape), first.view(shape), second.view(shape))
                _update_on(weight.device.type)(*rows, number, place, *constants)

    def _prepare(
        self, group: dict[str, Any], parameters: list[Any], steps: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Count the step, and compute once for all parameters what an element would repeat: for each, the
        numbers and the place that `_update` takes."""
        one = torch.ones_like(steps[0])
        skip, divide_by = getattr(self, "found_inf", 0 * one), getattr(self, "grad_scale", one)
        torch._foreach_add_(steps, 1 - skip)
        done = torch.stack(steps).clamp(min=1)
        beta1, beta2 = group["betas"]
        equal = [
            torch.full_like(done, group["lr"]),
            (one * divide_by).expand_as(done),
            (one * skip).expand_as(done),
        ]
        numbers = [*equal, 1 - beta1**done, 1 - beta2**done]
        key, *where = torch.stack([self._places[parameter] for parameter in parameters]).unbind(1)
        drawn = _hash((done.long() * 0x9E3779B1 + key) & _WORD)
        return torch.stack(numbers, 1), torch.stack([drawn, *where], 1)


def _update_on(device_type: str) -> Callable[..., None]:
    """The update of a parameter's (weight, gradient, first moment, second moment), each (rows, columns), in
    place."""
    if device_type != "cuda":
        return _update_in_chunks
    from shardwise.optim.kernels import update

    return update


def _update_in_chunks(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Tensor,
    place: Tensor,
    *constants: float,
) -> None:
    rows, columns = weight.shape
    height, width = max(1, CHUNK // columns), min(columns, CHUNK)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            block = slice(top, top + height), slice(left, left + width)
            _update(
                weight[block],
                gradient[block],
                first[block],
                second[block],
                top,
                left,
                numbers,
                place,
                *constants,
            )


def _update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    top: int,
    left: int,
    numbers: Tensor,
    place: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """AdamW in float32, and back to bfloat16, on a block of rows and columns that begins there."""
    lr, divide_by, skip, unbias1, unbias2 = numbers.unbind()
    g = gradient.float() / divide_by
    m = beta1 * first.float() + (1 - beta1) * g
    v = beta2 * second.float() + (1 - beta2) * g * g
    w = weight.float() * (1 - lr * decay) - lr * (m / unbias1 / ((v / unbias2).sqrt() + epsilon))
    bits = _draw(top, left, weight.shape, place)
    for state, number, chance in (
        (weight, w, bits & 0xFFFF),
        (first, m, bits >> 16),
        (second, v, bits >> 16),
    ):
        state.copy_(torch.where(skip > 0, state, round_by_chance(number, chance)))


def round_by_chance(numbers: Tensor, chance: Tensor) -> Tensor:
    """float32 to bfloat16; `chance` is from 0 to 65535. bfloat16 is the upper half of a float32's bits, so
    adding the chance to the lower half carries into the upper one as often as the lower half is large."""
    return (
        ((numbers.view(torch.int32) + chance.to(torch.int32)) & -0x10000)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def _draw(top: int, left: int, shape: torch.Size, place: Tensor) -> Tensor:
    """32 bits for each element of a block that begins there among this rank's rows and columns, by their
    places in the whole parameter."""
    drawn, offset, whole_row = place.unbind()
    row, column = (torch.arange(count, device=place.device) for count in shape)
    there = ((row + top) * whole_row + offset + left)[:, None] + column
    return _hash((there & _WORD) ^ drawn)


def _hash(words: Tensor) -> Tensor:
    """32 bits to 32 bits in which every bit depends on all of them. In int64, where no product overflows."""
    for _ in range(2):
        words = ((words >> 16) ^ words) * 0x45D9F3B & _WORD
    return (words >> 16) ^ words


def _width(parameter: Tensor, held: Slices) -> int | None:
    """How many of this rank's elements lie side by side in the whole parameter: None for all of them, or
    where the second dim is split (none but the first two ever are) a row's. In one long row a GPU finds an
    element's place without dividing."""
    if len(held) < 2 or held[1].stop - held[1].start == parameter.shape[1]:
        return None
    return int(held[1].stop - held[1].start) * prod(parameter.shape[2:])


def _place(parameter: Tensor, held: Slices, key: int) -> Tensor:
    """Where this rank's elements are in the whole parameter: (key, place of the first element, length of a
    row of the whole)."""
    rows, columns = (*held, slice(0, 1), slice(0, 1))[:2]
    width, inner = (*parameter.shape, 1, 1)[1], prod(parameter.shape[2:])
    numbers = [key, rows.start * width * inner + columns.start * inner, width * inner]
    return torch.tensor(numbers, device=parameter.device)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little")
