"""The trial of a torch.optim class: small weights on a CPU, whole and in parts, before a job is accepted.

A rank updates its piece of a weight, with state from the run. So four things must hold, and all are tried for
a few steps in float64, with changing learning rates and gradients of several sizes:

- the class can be made with the job's settings, and `step()` needs no closure;
- its states have the weight's shape, or are single numbers, and are the same ones after every step;
- an optimizer that is made anew for each step, and given only this state, does what one does that lives on;
- two halves of a weight, each updated alone, become the two halves of what the whole becomes.

The trial also finds the dtypes of the states, and counts the numbers that the operators of an update move.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import UserError, shown
from shardwise.optimizers.class_step import INSTEAD, ClassStep, Piece, States, make
from shardwise.user_file import load_file, locate

SHAPE = (96, 64)
"""Shape of the weight of the trial. It is larger than what classes treat as a small weight."""
RATES = (0.01, 0.05, 0.02, 0.02)
"""The learning rate of each step."""
SIZES = (1.0, 30.0, 0.01, 1.0)
"""The size of the gradients of each step."""
ENOUGH = 1e-6
"""Largest relative difference of results that count as equal: summing in another order makes 1e-15."""


def complete_settings(values: dict[str, object], known: Collection[str]) -> dict[str, object]:
    """Return the table of a job with the weight decay that its class has by default, and with tuples for
    lists. Refuse keywords that the class does not have, and values that a job cannot hold."""
    name = str(values["name"])
    kind = load_class(name)
    where, keywords = f"optimizer.name = {name!r}", _keywords(kind)
    values = dict(values)
    for key in [key for key in values if key not in known]:
        if key in ("lr", "learning_rate"):
            raise UserError(f"optimizer.{key}: the learning rate of the schedule is train.learning_rate")
        if keywords is not None and key not in keywords:
            near = difflib.get_close_matches(key, keywords, n=1, cutoff=0.5)
            advice = f". Did you mean {near[0]}?" if near else f"; its keywords are {', '.join(keywords)}"
            raise UserError(f"optimizer.{key}: {kind.__name__} has no keyword {shown(key)}{advice}")
        if values[key] is None and (keywords or {}).get(key, 0) is None:
            del values[key]
            continue
        values[key] = _plain(f"optimizer.{key}", values[key])
    if "weight_decay" not in values:
        settings = {key: value for key, value in values.items() if key not in known}
        with _words_of_class(where, kind):
            made = make(kind, [nn.Parameter(torch.zeros(2, 2))], settings)
        values["weight_decay"] = float(made.defaults.get("weight_decay") or 0.0)
    return values


def load_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class that `torch.optim.NAdam`, `package.module.Class` or `file.py:Class` names."""
    where = f"optimizer.name = {shown(name)}"
    if ":" in name:
        path, attribute = locate(where, name, "optimizers.py:OwnOptimizer")
        place = path.name
    else:
        place, _, attribute = name.rpartition(".")
    try:
        module = load_file(path) if ":" in name else import_module(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a file of a user may raise anything
        raise UserError(f"{where}: {place} could not be run: {type(error).__name__}: {error}") from error
    kind = getattr(module, attribute, None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return kind
    classes = [
        each
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and each != "Optimizer"
    ]
    near = difflib.get_close_matches(attribute, classes, n=1, cutoff=0.6)
    advice = f". Did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(classes)) or 'none'}"
    raise UserError(f"{where}: {place} has no optimizer class {attribute}{advice}")


def _keywords(kind: type[torch.optim.Optimizer]) -> dict[str, object] | None:
    """Return the defaults of the keywords of a class; None: it takes any."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {each.name: each.default for each in parameters if each.name != "lr"}


def _plain(where: str, value: object) -> object:
    """Return a value of a setting, with tuples for lists; refuse what TOML cannot hold."""
    if isinstance(value, list | tuple):
        return tuple(_plain(where, part) for part in value)
    if isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{where} = {shown(value)}: a {type(value).__name__} cannot be a setting of a job; give a number, a "
        "text, true or false, or a list of them"
    )


@contextmanager
def _words_of_class(where: str, kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Raise what a class itself says against its settings or its first steps."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a class of others may raise anything
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(f"{where}: {kind.__name__} says: {text}") from error


@dataclass(frozen=True)
class Trial:
    """What the trial of a class found out."""

    step: ClassStep
    from_zeros: bool
    """Whether all slots begin as zeros."""
    numbers_moved: float
    """Numbers per parameter that the operators of an update read and write."""

    def check_decay(self, name: str) -> None:
        """Refuse a weight decay where the class has none."""
        if not self.step.decays:
            raise UserError(
                f"optimizer.groups: {name} has no weight decay; leave weight_decay out of the groups"
            )


def tried(name: str, weight_decay: float, settings: Mapping[str, object]) -> Trial:
    """Return the trial of a class with these settings; raise a `UserError` if it cannot be sharded."""
    return _tried(name, weight_decay, tuple(settings.items()))


@cache
def _tried(name: str, weight_decay: float, given: tuple[tuple[str, Any], ...]) -> Trial:
    kind, settings = load_class(name), dict(given)
    where = f"optimizer.name = {name!r}"
    keywords = _keywords(kind)
    if weight_decay or (keywords is not None and "weight_decay" in keywords):
        settings["weight_decay"] = weight_decay
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _words_of_class(where, kind):
        return _Attempt(where, kind, settings, weight_decay).trial()


class _Attempt:
    """The steps of a trial."""

    def __init__(
        self, where: str, kind: type[torch.optim.Optimizer], settings: Mapping[str, object], decay: float
    ) -> None:
        self.where, self.kind, self.settings, self.decay = where, kind, settings, decay
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        self.gradients = [
            size * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for size in SIZES
        ]

    def trial(self) -> Trial:
        """Try the class in every way, and return what was found."""
        self._check_closure()
        whole, states, decays = self._living(torch.float64)
        _, narrow, _ = self._living(torch.float32)
        states = self._with_dtypes(states, narrow)
        step = ClassStep(self.kind, self.settings, states, decays)
        again = self._renewed(step, [self.weight], [[gradient] for gradient in self.gradients])
        if not _equal(again, whole):
            raise UserError(
                f"{self.where}: an optimizer that is made anew for each step, and given its `state`, does "
                "not do what one does that lives on. The class draws random numbers, ignores the learning "
                "rate of its group, or keeps numbers outside of `state`, where no checkpoint would hold "
                f"them. {INSTEAD}"
            )
        self._check_halves(step, whole)
        return Trial(step, self._from_zeros(step), self._numbers_moved(step))

    def _check_closure(self) -> None:
        closure = inspect.signature(self.kind.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UserError(
                f"{self.where}: its step() needs a closure that computes the loss again, and a step here "
                f"computes its gradients once. {INSTEAD}"
            )

    def _living(self, dtype: torch.dtype) -> tuple[Tensor, States, bool]:
        """Update a whole weight by one optimizer; return the weight, the states and whether it decays."""
        parameter = nn.Parameter(self.weight.to(dtype, copy=True))
        optimizer = make(self.kind, [parameter], self.settings, RATES[0])
        if "lr" not in optimizer.param_groups[0]:
            raise UserError(f"{self.where}: its groups have no `lr`, which the schedule would set. {INSTEAD}")
        seen = []
        for count, (lr, gradient) in enumerate(zip(RATES, self.gradients, strict=True), 1):
            optimizer.param_groups[0]["lr"] = lr
            parameter.grad = gradient.to(dtype, copy=True)
            optimizer.step()
            seen.append(self._states(optimizer.state.get(parameter, {}), count))
        if any(states != seen[0] for states in seen):
            raise UserError(
                f"{self.where}: it keeps other states after some steps than after the first. {INSTEAD}"
            )
        return parameter.detach(), seen[0], "weight_decay" in optimizer.param_groups[0]

    def _states(self, state: Mapping[str, Any], count: int) -> States:
        """Return what a class keeps after `count` steps; refuse what cannot be split like a weight."""
        slots: dict[str, str | None] = {}
        scalars: dict[str, type | torch.dtype] = {}
        step = None
        for name, value in state.items():
            if value is None:
                continue
            form = value.dtype if isinstance(value, Tensor) else type(value)
            if isinstance(value, Tensor) and value.shape == SHAPE:
                slots[name] = str(value.dtype).removeprefix("torch.")
            elif not isinstance(value, bool | int | float) and not (
                isinstance(value, Tensor) and value.ndim == 0
            ):
                what = (
                    f"of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else f"a {type(value).__name__}"
                )
                raise UserError(
                    f"{self.where}: it keeps {name}, {what}, for a weight of shape {SHAPE}, so its state "
                    f"cannot be split like the weight. {INSTEAD}"
                )
            elif name == "step" and float(value) == count:
                step = form
            elif name == "step":
                raise UserError(f"{self.where}: it keeps a `step` that is not the number of steps. {INSTEAD}")
            else:
                scalars[name] = form
        return States(slots, scalars, step)

    def _with_dtypes(self, wide: States, narrow: States) -> States:
        """Return the states with the dtypes of slots, given those of float64 and of float32 weights."""
        slots: dict[str, str | None] = {}
        for name, dtype in wide.slots.items():
            other = narrow.slots.get(name)
            slots[name] = None if (dtype, other) == ("float64", "float32") else other
        return States(slots, narrow.scalars, narrow.step)

    def _renewed(
        self, step: ClassStep, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Update each of these parts alone, by a new optimizer in each step, and return them together."""
        results = []
        for index, weight in enumerate(weights):
            piece = _new_piece(step, weight)
            for lr, of_parts in zip(RATES, gradients, strict=True):
                piece.gradient = of_parts[index].clone()
                (piece.scalars,) = step.update([piece], lr, self.decay)
                piece.done += 1
            results.append(piece.weight.reshape(-1))
        return torch.cat(results).view(SHAPE)

    def _check_halves(self, step: ClassStep, whole: Tensor) -> None:
        """Refuse a class that updates parts of a weight in another way than the whole."""
        reason = "updated separately, the halves of a weight do not become what the whole weight becomes"
        try:
            rows = self._renewed(step, self.weight.chunk(2), [each.chunk(2) for each in self.gradients])
            flat = self._renewed(step, self._flat(self.weight), list(map(self._flat, self.gradients)))
            same = _equal(rows, whole) and _equal(flat, whole)
        except Exception as error:  # such as Muon's, which wants matrices
            same, reason = False, f"a part of a weight is refused: {str(error).splitlines()[0]}"
        if not same:
            raise UserError(
                f"{self.where}: {reason}. It does not treat each number independently, so a device cannot "
                f"update its shard alone. {INSTEAD}"
            )

    def _flat(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return a tensor in vectors that are longer than a row."""
        return torch.split(tensor.view(-1), SHAPE[1] + 1)

    def _from_zeros(self, step: ClassStep) -> bool:
        """Return whether states begin as zeros, as far as the first step of a zero weight with a zero
        gradient shows."""
        piece = _new_piece(step, torch.zeros(SHAPE, dtype=torch.float64))
        step.update([piece], RATES[0], 0.0)
        return all(float(slot.abs().max()) < ENOUGH for slot in piece.slots)  # Adamax adds epsilon

    def _numbers_moved(self, step: ClassStep) -> float:
        piece = _new_piece(step, self.weight)
        (piece.scalars,) = step.update([piece], RATES[0], 0.0)
        piece.done = 1
        with _Moved(piece.weight.numel()) as moved:
            step.update([piece], RATES[0], self.decay)
        return float(moved.numbers / piece.weight.numel())


def _new_piece(step: ClassStep, weight: Tensor) -> Piece:
    """Return a copy of a weight with empty state and a gradient of zeros."""
    names = step.states.slots.values()
    dtypes = [weight.dtype if name is None else getattr(torch, name) for name in names]
    slots = [torch.zeros_like(weight, dtype=dtype) for dtype in dtypes]
    return Piece(weight.clone(), torch.zeros_like(weight), slots, [0.0] * len(step.states.scalars), 0)


def _equal(found: Tensor, expected: Tensor) -> bool:
    if not expected.isfinite().all():
        return False
    return bool((found - expected).abs().max() <= ENOUGH * expected.abs().max())


class _Moved(TorchDispatchMode):
    """Counts the numbers that operators read and write, of tensors of one size; views move none."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.numbers = size, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view and operator is not torch.ops.aten.detach.default:
            written = args[0] if result is None and args else result  # kernels for many tensors return none
            parts = (*args, *(kwargs or {}).values(), written)
            lists = (part if isinstance(part, list | tuple) else [part] for part in parts)
            tensors = (each for part in lists for each in part)
            sizes = (each.numel() for each in tensors if isinstance(each, Tensor))
            self.numbers += sum(size for size in sizes if size == self.size)
        return result
