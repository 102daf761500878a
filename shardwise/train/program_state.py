"""Values of a program that are saved with its checkpoints: how they become bytes, and what they may be.

The bytes are loaded without running code, as torch loads weights, so that a checkpoint of others does no
harm. That allows numbers, texts, tensors, and lists and dictionaries of them. Numbers and arrays of numpy are
saved as tensors, and are of their own types again when they are loaded.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import UserError

PLAIN = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter)
"""Types of values that can be saved. A subclass may not: the bytes would name it."""
WHAT_TO_KEEP = "keep numbers, texts, tensors, numpy arrays, and lists and dictionaries of them"


def to_bytes(value: object) -> bytes:
    """Return a value as bytes that can be loaded without running code; raise if it is of another kind."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_WithNumpy)
    from_bytes(buffer.getvalue())
    return buffer.getvalue()


def from_bytes(saved: bytes) -> Any:
    """Return a value that was saved."""
    with torch.serialization.safe_globals([numpy_value]):
        return torch.load(io.BytesIO(saved), weights_only=True)


def numpy_value(values: Tensor, is_number: bool) -> Any:
    """Return an array of numpy, or a single number, that was saved as a tensor."""
    array = values.numpy()
    return array[()] if is_number else array


class _Pickler(pickle.Pickler):
    """Saves numbers and arrays of numpy as tensors, together with what makes numpy's of them again."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is made again; `NotImplemented`: as pickle does it."""
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            try:
                values = torch.from_numpy(np.array(value, order="C"))
            except (TypeError, ValueError):  # torch has no such numbers, or they are no numbers
                return NotImplemented
            return numpy_value, (values, isinstance(value, np.generic))
        return NotImplemented


class _WithNumpy:
    """Takes the place of the module `pickle` in `torch.save`."""

    Pickler = _Pickler


def check_can_be_saved(name: str, value: object) -> None:
    """Raise if a value cannot be saved, with the name of the part that cannot. `name` is that of the
    value."""
    for problem in _problems(name, value):
        raise UserError(problem)


def _problems(name: str, value: object) -> Iterator[str]:
    kind = type(value)
    if kind in PLAIN:
        return
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict), "these are dictionaries"
        for key, part in value.items():
            yield from _problems(f"the key {key!r} of {name}", key)
            yield from _problems(f"{name}[{key!r}]", part)
    elif kind in (list, tuple, set):
        assert isinstance(value, list | tuple | set), "these have elements"
        for index, part in enumerate(value):
            yield from _problems(f"{name}[{index}]" if kind is not set else f"an element of {name}", part)
    elif not _can_be_saved(value):
        yield f"{name} is a {_described(kind)}, which a checkpoint cannot hold; {_advice(value)}"


def _can_be_saved(value: object) -> bool:
    try:
        to_bytes(value)
    except Exception:
        return False
    return True


def _described(kind: type) -> str:
    return f"numpy {kind.__name__}" if issubclass(kind, np.generic | np.ndarray) else kind.__name__


def _advice(value: object) -> str:
    """Return what to keep instead of a value."""
    if isinstance(value, np.ndarray):
        return f"its elements are of the dtype {value.dtype}; keep a list of them, as array.tolist() makes it"
    if isinstance(value, np.generic):
        return "keep the number or text of Python that its item() returns"
    if hasattr(value, "state_dict"):
        return "keep what its state_dict() returns"
    return WHAT_TO_KEEP
