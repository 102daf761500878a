"""Replace a module by one that computes in another way, with the same parameters under the same names.

A model is built plain, and some of its modules then have to do more than their class does: sum over devices,
recompute activations in backward, run compiled. Each such addition is a class, here called a kind: `Column`
in parallel/tensor.py, `Recomputed` in parallel/recompute.py. `replacement` makes an object of a class that
inherits from both, the kind first, so that `super().forward` in the kind is the module's own forward. A
`Linear` becomes a `ColumnLinear`, a `Block` becomes a `RecomputedBlock`. `put_in_place` then puts the new
object wherever the model held the original.

Printing the model shows these classes, so it shows what runs. A wrapper around the module would show it too,
but would add a level to the names of all parameters; another `forward` set on the module would be hidden.

The new object and the original share their `__dict__`. Code of a user's module may still refer to the
original: a bound method does, or a function that was defined in a constructor. It then finds the same
parameters, sub-modules, attributes and mode (train or eval) as in the new object.

All modules of a kind and a class share one new class, because the compiler compiles a block again if its
parts have other classes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

_Container = dict[Any, Any] | list[Any]


class Replacement(nn.Module):
    """A module that takes the place of another and has all its attributes. Kinds are subclasses of this.

    A kind comes before the class of a user's module, so its attributes and methods need names that a user's
    module does not have.
    """

    def __init__(self, module: nn.Module, **attributes: object) -> None:
        # Neither torch's constructor nor that of the module's class is called: the module has called them.
        object.__setattr__(self, "__dict__", vars(module))
        vars(self).update(attributes)


class _ForwardOfInstance(nn.Module):
    """Base of a replacement for a module whose `forward` is an attribute of the object, where it would hide
    the methods of all classes."""

    forward_of_instance: Callable[..., object]

    def forward(self, *inputs: object, **named: object) -> object:
        return self.forward_of_instance(*inputs, **named)

    def extra_repr(self) -> str:
        forward = self.forward_of_instance
        name = getattr(forward, "__qualname__", type(forward).__name__)  # its repr would print this module
        return join_texts(super().extra_repr(), f"forward: {name}")


def replacement(
    module: nn.Module,
    kind: type[Replacement],
    properties: Mapping[str, property] | None = None,
    base: type[nn.Module] | None = None,
    **attributes: object,
) -> nn.Module:
    """Return a module of this kind and of the module's class, to take the module's place.

    The attributes go to the kind's constructor; properties become part of the class. `base` is used instead
    of the module's class.
    """
    base = base or type(module)
    bases: tuple[type[nn.Module], ...] = (kind, base)
    if "forward" in vars(module):
        vars(module)["forward_of_instance"] = vars(module).pop("forward")
        bases = (kind, _ForwardOfInstance, base)
    return _combined_class(bases, tuple((properties or {}).items()))(module, **attributes)


@cache
def _combined_class(
    bases: tuple[type[nn.Module], ...], properties: tuple[tuple[str, property], ...]
) -> Callable[..., nn.Module]:
    """Return the class with these bases: the first is the kind, the last the module's class."""
    kind, *_, original = bases
    contents = {
        "__module__": original.__module__,
        "__doc__": kind.__doc__,
        "__init__": kind.__init__,  # not that of a kind which the module is of already
        **dict(properties),
    }
    return type(f"{kind.__name__}{original.__name__}", bases, contents)


def put_in_place(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put these modules (values) wherever the model held the originals (keys), and return the new model.

    They are replaced as sub-modules, under any number of names, and in lists, tuples, dicts and bound methods
    that are attributes of modules. The new model is the old one where it has no replacement itself.
    """
    search = _Search({id(original): module for original, module in replacements.items()})
    new_model = search.visit(model)
    while search.containers:
        search.replace_in(search.containers.pop())
    assert isinstance(new_model, nn.Module)
    return new_model


class _Search:
    """A walk through all attributes of modules and what they contain."""

    def __init__(self, replacements: Mapping[int, nn.Module]) -> None:
        self.replacements = replacements
        """The modules to put in place, by the id of the original."""
        self.containers: list[_Container] = []
        """Containers that have not been walked through yet."""
        self._seen: set[int] = set()

    def visit(self, value: object) -> object:
        """Return what a container should hold in place of this value, and add the containers in the value."""
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
        return values if all(map(operator.is_, visited, values)) else visited

    def _add(self, container: _Container) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self.containers.append(container)

    def replace_in(self, container: _Container) -> None:
        """Walk through a container, and change it where it holds an original."""
        items: Iterable[tuple[Any, object]] = (
            list(container.items()) if isinstance(container, dict) else enumerate(list(container))
        )
        for key, value in items:
            visited = self.visit(value)
            if visited is not value:
                container[key] = visited


def join_texts(*texts: str) -> str:
    """Return the printed descriptions of a module and its kinds as one text, without empty ones."""
    return ", ".join(text for text in texts if text)
