"""Build a model of any size without memory for its weights, but with the values of its buffers.

On torch's meta device a constructor has no values at all: a table of angles is as empty as a matrix of
weights, and code that reads a number (`torch.linspace(0, 0.1, layers)[i].item()`, as many models do) fails.
A constructor therefore runs on the CPU as its author wrote it. As soon as a module gets a parameter, the
parameter moves to the meta device and its memory is freed. So at most one weight is in memory, and no random
numbers are drawn for weights that are allocated first and filled later, as in torch's own modules. Buffers
stay.

Values that a constructor gives its weights are lost: those of `nn.Parameter(torch.eye(8))`, of
`weight.copy_(table)`, of `nn.init.zeros_(weight)`. To keep them, every process would have to hold the whole
model for a while. But `lost_values` finds them by watching what a constructor computes, so that a run can
report them. Values that a constructor draws at random do not count, because shardwise draws them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise._torch import DispatchMode, Operator, writes_to_its_input
from shardwise._torch import storage_of as _storage

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_OVERWRITE = {_aten.copy_, _aten.fill_, _aten.zero_}
"""Operations that do not read the tensor which they write."""


@contextmanager
def weights_without_memory(
    seed: int = 0, on_register: Callable[[Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside this context, parameters of new modules are on the meta device.

    Random numbers of constructors, for buffers say, follow from the seed; the state of torch's generator is
    restored at the end. `on_register` is called with each parameter that had memory, and the parameter that
    takes its place.
    """
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
    """Return the weights to which a constructor gives values that are not drawn at random.

    Keys are names; values are the number that all elements of the weight have, or None where they differ.
    """
    watch = _Watch()
    with weights_without_memory(seed, watch.registered), watch:
        model = build()
    return {
        name: watch.given[key]
        for name, weight in model.named_parameters()
        if (key := _storage(weight)) in watch.given
    }


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation of a constructor. Tensors are identified by their memory, which views and
    parameters share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[int, float | None] = {}
        """For the storage of each weight, the number that all its elements have, or None if they differ."""
        self._empty: set[int] = set()
        self._drawn: set[int] = set()
        self._alive: list[Tensor] = []
        """Weights, which are kept so that no later tensor gets their storage."""

    def registered(self, parameter: Tensor, weight: Tensor) -> None:
        """Note that a module gets a parameter, whose place `weight` takes without memory."""
        self._alive.append(weight)
        if _storage(parameter) not in self._empty | self._drawn and parameter.numel():
            first = parameter.detach().reshape(-1)[0]
            self.given[_storage(weight)] = float(first) if bool((parameter == first).all()) else None

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
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

    def _note_write(
        self, func: Operator, inputs: list[Tensor], args: tuple[object, ...], is_drawn: bool
    ) -> None:
        target, key = inputs[0], _storage(inputs[0])
        self._empty.discard(key)
        self._drawn.discard(key)
        if is_drawn:
            self._drawn.add(key)
            self.given.pop(key, None)
        elif target.is_meta and func.overloadpacket in _OVERWRITE:
            self._note_value(func, inputs, args)

    def _note_value(self, func: Operator, inputs: list[Tensor], args: tuple[object, ...]) -> None:
        """Note that a weight without memory is given values: one number for all elements, or several."""
        target, operation = inputs[0], func.overloadpacket
        if operation is _aten.copy_ and any(
            _storage(weight) == _storage(inputs[1]) for weight in self._alive
        ):
            return  # copied from another weight, which has no values here
        value = 0.0 if operation is _aten.zero_ else None
        if operation is _aten.fill_ and isinstance(args[1], int | float):
            value = float(args[1])
        is_whole = target.numel() * target.itemsize == target.untyped_storage().nbytes()
        self.given[_storage(target)] = value if is_whole else None

    def _note_new(self, func: Operator, inputs: list[Tensor], result: object, is_drawn: bool) -> None:
        before = {_storage(tensor) for tensor in inputs}
        new = {_storage(tensor) for tensor in _tensors([result])} - before
        self._empty -= new  # memory that belonged to another tensor before
        self._drawn -= new
        if func.overloadpacket in _EMPTY:
            self._empty |= new
        elif is_drawn:
            self._drawn |= new


def _tensors(values: object) -> list[Tensor]:
    """Return the tensors among the inputs or outputs of an operator, in lists too."""
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in _tensors(value)] if isinstance(values, list | tuple) else []


class ExactBuffers(nn.Module):
    """A module whose buffers keep their values and dtypes whatever cast or `to_empty` is applied to the
    model; they move between devices with it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactBuffers:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self
