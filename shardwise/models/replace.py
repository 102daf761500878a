"""Replace a module by one that computes in another way, with the same parameters under the same names.

A model is built plain, and some of its modules then have to do more than their class says: sum over devices,
recompute activations in backward, run compiled. Each such addition is a class here called a kind: `Column` in
parallel/tensor.py, `Recomputed` in parallel/recompute.py. `replacement` makes an object of a class that is
both, the kind first, so that `super().forward` in the kind is what the module computes by itself. A `Linear`
becomes a `ColumnLinear`, a `Block` becomes a `RecomputedBlock`. `put_in_place` then lets the model hold the
new object wherever it held the original.

Printing the model shows these classes, so it shows what runs. A wrapper around the module would show it too,
but would add a level to the names of all parameters; another `forward` set on the module would be hidden.

The new object and the original have one `__dict__`. Some code of a user's module may still refer to the
original, as a bound method does, or a function that was defined in a constructor. It then finds the same
parameters, sub-modules, attributes and mode (train or eval) as the new object has.

One class serves all modules of a kind, because the compiler compiles blocks anew whose parts differ in class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MethodType
from typing import Any

from torch import nn


class Replacement(nn.Module):
    """A module that takes the place of another, with all that the other has. Kinds are subclasses of this.

    A kind comes before the class of a user's module, so its attributes and methods need names that a user's
    module does not have.
    """

    def __init__(self, module: nn.Module, **attributes: object) -> None:
        # Neither torch's constructor nor that of the module's class is called: all they set up is there.
        object.__setattr__(self, "__dict__", vars(module))
        vars(self).update(attributes)


class _ForwardOfInstance(nn.Module):
    """Base of a replacement for a module that has a `forward` as an attribute of the object, where it would
    hide the methods of all classes."""

    forward_of_instance: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.forward_of_instance(*inputs, **named)

    def extra_repr(self) -> str:
        forward = self.forward_of_instance
        name = getattr(forward, "__qualname__", type(forward).__name__)  # its repr would print this module
        return join_texts(super().extra_repr(), f"forward: {name}")


def replacement(
    module: nn.Module,
    kind: type[Replacement],
    properties: Mapping[str, property] | None = None,
    **attributes: object,
) -> nn.Module:
    """Return a module of this kind and of the module's own class, to take the module's place. The attributes
    go to the kind's constructor; properties become part of the class."""
    bases: tuple[type[nn.Module], ...] = (kind, type(module))
    if "forward" in vars(module):
        vars(module)["forward_of_instance"] = vars(module).pop("forward")
        bases = (kind, _ForwardOfInstance, type(module))
    return _joined(bases, tuple((properties or {}).items()))(module, **attributes)


@cache
def _joined(
    bases: tuple[type[nn.Module], ...], properties: tuple[tuple[str, property], ...]
) -> Callable[..., nn.Module]:
    """Return the class with these bases, of which the first is the kind and the last the module's class."""
    kind, *_, original = bases
    contents = {
        "__module__": original.__module__,
        "__doc__": kind.__doc__,
        "__init__": kind.__init__,  # not that of a kind which the module is of already
        **dict(properties),
    }
    return type(f"{kind.__name__}{original.__name__}", bases, contents)


def put_in_place(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Let the model hold these modules (values) wherever it held the originals (keys): as a sub-module under
    any number of names, and in lists, tuples, dicts and bound methods that are attributes of its modules.
    Returns what takes the place of the model itself, which is the model where it has no replacement."""
    search = _Search({id(original): module for original, module in replacements.items()})
    found = search.visit(model)
    while search.containers:
        search.replace_in(search.containers.pop())
    assert isinstance(found, nn.Module)
    return found


class _Search:
    """A walk through all that modules hold."""

    def __init__(self, replacements: Mapping[int, nn.Module]) -> None:
        self.replacements = replacements
        """The modules to put in place, by the id of the original."""
        self.containers: list[dict[Any, Any] | list[Any]] = []
        """What is still to be walked through."""
        self._seen: set[int] = set()

    def visit(self, value: object) -> object:
        """Return what a container is to hold in place of this value; note the containers that it leads to."""
        if isinstance(value, nn.Module):
            self._add(vars(value))
            return self.replacements.get(id(value), value)
        if isinstance(value, dict | list):
            self._add(value)
        elif type(value) is tuple:
            return self._visit_tuple(value)
        elif isinstance(value, MethodType) and id(value.__self__) in self.replacements:
            return MethodType(value.__func__, self.replacements[id(value.__self__)])
        return value

    def _visit_tuple(self, values: tuple[object, ...]) -> tuple[object, ...]:
        visited = tuple(map(self.visit, values))
        return values if all(map(_is, visited, values)) else visited

    def _add(self, container: dict[Any, Any] | list[Any]) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self.containers.append(container)

    def replace_in(self, container: dict[Any, Any] | list[Any]) -> None:
        """Walk through one container, and change it where it holds an original."""
        items: Iterable[tuple[Any, object]] = (
            list(container.items()) if isinstance(container, dict) else enumerate(list(container))
        )
        for key, value in items:
            visited = self.visit(value)
            if visited is not value:
                container[key] = visited


def _is(one: object, other: object) -> bool:
    return one is other


def join_texts(*texts: str) -> str:
    """Return what a module and its kinds say of themselves when printed, as one text."""
    return ", ".join(text for text in texts if text)
