"""Building a model without memory for its weights, whatever its size, and with buffers that have their
values.

Under torch's meta device a constructor has no values at all: a table of angles is as empty as a matrix of
weights, and code that looks at a number (`torch.linspace(0, 0.1, layers)[i].item()`, as many models have it)
fails. So a constructor runs on the CPU as its author wrote it, and each parameter goes to the meta device in
the moment in which a module gets it. What a parameter is made from is gone right after: of a model of any
size at most one weight is in memory, and nothing is drawn for weights that are allocated first and filled
later, as those of torch's own modules are. Buffers stay.

Values that a constructor gives its weights are lost: those of `nn.Parameter(torch.eye(8))`, of
`weight.copy_(table)`, of `nn.init.zeros_(weight)`. To keep them, every process would have to hold the whole
model for a while. But they can be found, by watching what a constructor computes (`lost_values`), so that a
run can say it. What a constructor draws at random is not counted: that shardwise draws the weights is the
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise._torch import DispatchMode, writes_to_its_input
from shardwise._torch import storage_of as _storage

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_OVERWRITE = {_aten.copy_, _aten.fill_, _aten.zero_}
"""Operations that read nothing of what they write to."""


@contextmanager
def weights_without_memory(
    seed: int = 0, on_register: Callable[[Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside, parameters of modules that are built are on the meta device. What constructors draw, for a
    buffer say, is the same each time; the generator of this process is left as it was. `on_register` is
    called with each parameter that had memory, and with the one that takes its place."""
    made = WeakTensorKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in made:  # two modules may be given the same weight
            made[parameter] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            if on_register is not None:
                on_register(parameter, made[parameter])
        return made[parameter]  # type: ignore[no-any-return]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        handle.remove()


def lost_values(build: Callable[[], nn.Module], seed: int) -> dict[str, float | None]:
    """The weights of a module to which its constructor gives values that are not drawn at random: by name,
    the one value that all their numbers have, or None where they differ."""
    watch = _Watch()
    with weights_without_memory(seed, watch.registered), watch:
        model = build()
    return {
        name: watch.given[key]
        for name, weight in model.named_parameters()
        if (key := _storage(weight)) in watch.given
    }


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a constructor. Tensors are told apart by their memory, which views and
    parameters share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[int, float | None] = {}
        """By the storage of a weight: the one value that all its numbers have, or None if they differ."""
        self._empty: set[int] = set()
        self._drawn: set[int] = set()
        self._alive: list[Tensor] = []
        """Weights, so that their memory is nobody else's later."""

    def registered(self, parameter: Tensor, weight: Tensor) -> None:
        """A module gets a parameter; `weight` takes its place, without memory."""
        self._alive.append(weight)
        if _storage(parameter) not in self._empty | self._drawn and parameter.numel():
            first = parameter.detach().reshape(-1)[0]
            self.given[_storage(weight)] = float(first) if bool((parameter == first).all()) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _tensors(args)
        writes = bool(inputs) and writes_to_its_input(func)
        read = inputs[1:] if writes and func.overloadpacket in _OVERWRITE else inputs
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags or any(
            _storage(tensor) in self._drawn for tensor in read
        )
        if writes:
            self._note_write(func, inputs, args, is_drawn)
        else:
            self._note_new(func, inputs, result, is_drawn)
        return result

    def _note_write(self, func: Any, inputs: list[Tensor], args: Any, is_drawn: bool) -> None:
        target, key = inputs[0], _storage(inputs[0])
        self._empty.discard(key)
        self._drawn.discard(key)
        if is_drawn:
            self._drawn.add(key)
            self.given.pop(key, None)
        elif target.is_meta and func.overloadpacket in _OVERWRITE:
            self._note_value(func.overloadpacket, inputs, args)

    def _note_value(self, operation: Any, inputs: list[Tensor], args: Any) -> None:
        """A weight without memory is given values: one for all its numbers, or several."""
        target = inputs[0]
        if operation is _aten.copy_ and any(
            _storage(weight) == _storage(inputs[1]) for weight in self._alive
        ):
            return  # of another weight, which has no values here
        is_whole = target.numel() * target.itemsize == target.untyped_storage().nbytes()
        is_one_value = operation is _aten.zero_ or (
            operation is _aten.fill_ and not isinstance(args[1], Tensor)
        )
        value = (0.0 if operation is _aten.zero_ else float(args[1])) if is_one_value else None
        self.given[_storage(target)] = value if is_whole else None

    def _note_new(self, func: Any, inputs: list[Tensor], result: Any, is_drawn: bool) -> None:
        before = {_storage(tensor) for tensor in inputs}
        new = {_storage(tensor) for tensor in _tensors([result])} - before
        self._empty -= new  # memory that was another tensor's before
        self._drawn -= new
        if func.overloadpacket in _EMPTY:
            self._empty |= new
        elif is_drawn:
            self._drawn |= new


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among what an operator takes or returns, in lists too."""
    if isinstance(values, Tensor):
        return [values]
    return (
        [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []
    )


class ExactBuffers(nn.Module):
    """A module whose buffers stay what they are, in the dtype that they have, whatever cast or `to_empty` the
    model goes through; they follow it from device to device."""

    def _apply(self, fn: Any, recurse: bool = True) -> ExactBuffers:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self
