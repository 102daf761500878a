"""The module of a user's program, whose forward runs the program's loss function.

DDP and FSDP2 do their work in hooks around the forward of the whole model: weights are gathered there, and
gradients are summed once its output's backward ran. A loss function may use the model in any way: call it
twice, call some of its methods, read a weight. So the loss function itself runs inside of that forward. It
gets the module in a form whose call runs the user's forward and not those hooks, which would free the
weights after the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import UserError
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement
from shardwise.models.torch_dtypes import wide
from shardwise.models.user_module import MIXED, mixed_precision

LossFunction = Callable[[Any, Any], object]
"""Takes the model and one micro-batch; returns the summed loss, or several by name, and the number of items
in the sum."""
WHAT_TO_RETURN = (
    "Return the loss summed over the items of the batch, and their number, for example "
    '`F.cross_entropy(logits, targets, reduction="sum"), len(targets)`. Several losses are a dictionary of '
    "such sums"
)
"""Advice for a loss function that returns something else."""
LARGEST_NDIM = 8
"""Largest number of dims of the hidden states that stages exchange."""
ONE_CALL = (
    "with layout.pipeline a loss function calls the model itself, once, with its input as first argument"
)
"""What a pipeline asks of a loss function."""
_factories: list[Callable[[], object]] = []
"""The function that makes the present program's module; empty before the program has prepared one."""
_returned_modules = WeakSet[nn.Module]()
"""Modules that earlier calls of such functions returned, with all their parts."""
_returned_weights = WeakTensorKeyDictionary()
"""Weights with memory that earlier calls returned where weights get none."""


def use_factory(make: Callable[[], object]) -> None:
    """Let `make` make the module of this process's program from now on."""
    _factories[:] = [make]


def build_program_module(with_weights: bool = False) -> nn.Module:
    """Return a new module of this process's program, as its author makes it.

    It must be made anew by each call. One that the author has built before would still have its memory inside
    of `weights_without_memory`, which is freed when the model is put on its devices, and it would be cut up
    with the model. `with_weights`: this call is not inside of that context, and its weights are only read.
    """
    if not _factories:
        raise UserError(
            'model.module = "program": no program has prepared a module in this process; give run.program too'
        )
    module = _factories[0]()
    if not isinstance(module, nn.Module):
        raise UserError(
            f"engine.prepare: the function returned {_described(module)}; it must return a torch.nn.Module"
        )
    if odd := [name for name, weight in module.named_parameters() if weight.is_complex()]:
        raise UserError(
            f"engine.prepare: the weight {odd[0]} is complex, and weights are real numbers; keep its real "
            f"and "
            "imaginary part in two"
        )
    _check_new(module, with_weights)
    return module


def _check_new(module: nn.Module, with_weights: bool) -> None:
    """Raise if an earlier call returned the same module, or a part with weights or a weight of it."""
    whole = f"the {type(module).__name__} that the function returned"
    for path, part in module.named_modules():
        if part in _returned_modules and any(True for _ in part.parameters()):
            what = f"{path} ({type(part).__name__}) of {whole}" if path else whole
            raise _not_new(what, is_part=bool(path))
    _returned_modules.update(module.modules())
    for path, weight in () if with_weights else module.named_parameters():
        if weight in _returned_weights:
            raise _not_new(f"the weight {path} of {whole}", is_part=True)
        if not weight.is_meta:
            _returned_weights[weight] = True


def _not_new(what: str, is_part: bool) -> UserError:
    instead = "put copy.deepcopy(…) of it into the model" if is_part else "return copy.deepcopy(net)"
    return UserError(
        f"engine.prepare: {what} is that of an earlier call. The function is called several times, and what "
        "it returns is cut up for the devices, so each call has to make all weights anew: build it inside of "
        f"the function, or {instead}"
    )


@dataclass
class LossSums:
    """Sums over the micro-batches of a step on this rank."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    """Each loss by its name."""
    items: Tensor | float = 0.0
    """Number of items."""

    def add(self, parts: Mapping[str, Tensor], items: Tensor | float) -> None:
        """Add the losses and the number of items of a micro-batch."""
        for name, part in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part.detach().double()
        self.items = self.items + items

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses, in order; none on a pipeline stage before the last one."""
        return tuple(sorted(self.parts))

    def vector(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the number of items and the losses of these names, which are 0 where a rank has none."""
        vector = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
        vector[0] = self.items
        for index, name in enumerate(names, start=1):
            vector[index] = self.parts.get(name, 0.0)
        return vector


@dataclass
class StageCall:
    """The call of the model inside of a loss function, on one pipeline stage."""

    number: int
    last: int
    """Number of the last stage."""
    hidden: Tensor
    """What the stage before returned; not used by the first stage."""
    made: bool = False
    """Whether the loss function has called the model."""


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function: the function and its micro-batch."""

    loss: LossFunction
    values: Any
    """The micro-batch, on the device."""
    first: int
    """Number of its first sample in the run."""
    sums: LossSums
    """Where the result of the call is added."""
    stage: StageCall | None = None
    """The pipeline stage; None: the model is not cut."""


class _StageEnded(BaseException):
    """Ends a loss function on a stage that is not the last one, where it has no result of the model."""

    def __init__(self, hidden: object) -> None:
        super().__init__()
        self.hidden = hidden


class OfProgram(Replacement):
    """The module of a user's program, called with a `LossCall`."""

    adapted_name: str
    """The name of the user's class, for messages."""
    original_class: type[nn.Module]
    program_dtype: torch.dtype
    stage_call: StageCall | None = None

    def forward(self, call: LossCall) -> Tensor:
        """Return the sum of the losses of a micro-batch. On a pipeline stage that is not the last one, return
        what the stage's part of the model returns."""
        vars(self)["stage_call"] = stage = call.stage
        try:
            with mixed_precision(_device_type(self), self.program_dtype):
                result = call.loss(_without_hooks(self), call.values)
        except _StageEnded as ended:
            return _checked_hidden(ended.hidden, self.adapted_name)
        if stage is not None and not stage.made:
            raise UserError(f"{_name(call.loss)} did not call the model; {ONE_CALL}")
        parts, items = checked_result(result, call.loss)
        dtype = wide(self.program_dtype)
        call.sums.add(parts, items)
        total = torch.stack([part.to(dtype) for part in parts.values()]).sum()
        if torch.is_grad_enabled() and not total.requires_grad:
            raise UserError(
                f"{_name(call.loss)} returned a loss that depends on no trained weight of the model; compute "
                "it with the model that the function is called with"
            )
        return total

    def extra_repr(self) -> str:
        """Return the module's own description, and how it is called."""
        return join_texts(super().extra_repr(), "called inside of the program's loss function")


def _without_hooks(module: OfProgram) -> nn.Module:
    """Return the module as the loss function sees it: the same object in all but the call, which runs the
    user's forward alone."""
    kind = _view_class(type(module), module.original_class)  # type: ignore[arg-type]
    view: nn.Module = object.__new__(kind)
    object.__setattr__(view, "__dict__", vars(module))
    return view


@cache
def _view_class(kind: type[OfProgram], original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a program's module whose call and forward are those of the user's class."""

    def forward(self: OfProgram, *inputs: object, **named: object) -> object:
        to = self.program_dtype
        if to in MIXED:
            inputs, named = _cast(inputs, to), _cast(named, to)
        stage = self.stage_call
        if stage is None:
            return super(OfProgram, self).forward(*inputs, **named)
        result = super(OfProgram, self).forward(*_inputs_of_stage(stage, inputs), **named)
        if stage.number < stage.last:
            raise _StageEnded(result)
        return result

    bases = (kind,) if issubclass(kind, original) else (kind, original)
    return type(kind.__name__, bases, {"forward": forward, "__call__": forward})


def _inputs_of_stage(stage: StageCall, inputs: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments of the model's forward on a stage: after the first stage, hidden states are in the
    place of the first argument."""
    if stage.made:
        raise UserError(f"the loss function called the model twice; {ONE_CALL}")
    if not inputs:
        raise UserError(f"the loss function called the model without a positional argument; {ONE_CALL}")
    stage.made = True
    return inputs if stage.number == 0 else (stage.hidden, *inputs[1:])


def _checked_hidden(hidden: object, name: str) -> Tensor:
    if isinstance(hidden, Tensor) and hidden.is_floating_point() and hidden.ndim <= LARGEST_NDIM:
        return hidden
    raise UserError(
        f"{name}.forward returned {_described(hidden)} on a pipeline stage before the last one; there it "
        "must return one tensor of floating-point numbers, the hidden states, which the next stage gets as "
        "first argument"
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return arguments of a forward in the dtype that the module computes in, as FSDP2 casts them."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: _cast(value, dtype) for key, value in values.items()}
    return tuple(_cast(value, dtype) for value in values) if type(values) is tuple else values


def for_program(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module that takes the place of a program's module and runs the program's loss function."""
    if dtype in MIXED:
        for part in module.children():  # a loss function may call them by themselves
            part.register_forward_pre_hook(
                lambda _, inputs, named: (_cast(inputs, dtype), _cast(named, dtype)), with_kwargs=True
            )
    kind = type(module)
    # fully_shard of torch 2.11 refuses lists and dictionaries of modules, also those with a forward.
    base = nn.Module if issubclass(kind, nn.ModuleList | nn.ModuleDict) else kind
    model = replacement(
        module, OfProgram, base=base, adapted_name=kind.__name__, original_class=kind, program_dtype=dtype
    )
    return put_in_place(module, {module: model})


def checked_result(result: object, loss: LossFunction) -> tuple[dict[str, Tensor], Tensor | float]:
    """Return the losses by name and the number of items that a loss function returned, or raise an error that
    says what it should return."""
    name = _name(loss)
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"{name} returned {_described(result)}. {WHAT_TO_RETURN}")
    losses, items = result
    parts = losses if isinstance(losses, dict) else {"loss": losses}
    for part, value in parts.items():
        if not isinstance(value, Tensor) or value.ndim or not isinstance(part, str):
            which = f"{part!r}: " if isinstance(losses, dict) else ""
            raise UserError(f"{name} returned {which}{_described(value)} as loss. {WHAT_TO_RETURN}")
    if not parts:
        raise UserError(f"{name} returned no loss. {WHAT_TO_RETURN}")
    return parts, _checked_items(items, name)


def _checked_items(items: object, name: str) -> Tensor | float:
    """Return the number of items, a tensor without waiting for its value."""
    if isinstance(items, Tensor) and items.ndim == 0:
        return items.detach().double()
    if isinstance(items, Real) and not isinstance(items, bool) and 0 <= float(items) < math.inf:
        return float(items)
    raise UserError(f"{name} returned {_described(items)} as the number of items. {WHAT_TO_RETURN}")


def _name(function: LossFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int | float):
        return str(value)
    return f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _device_type(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")
