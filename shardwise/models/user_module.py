"""A user's own `nn.Module` in place of the transformer: `[model] module = "file.py:Class"`.

The file is run once a process; the class (or function) in it is called with the job's `Model` section so that
a model of any size is built without memory for its weights (models/unallocated.py). What it returns is
trained like the transformer, provided that it keeps the contract of docs/sharding.md: `forward(inputs,
targets)` is the loss summed over targets, `forward(inputs, None)` the logits. Whatever else the loop has to
say (documents, positions, the one position to sample from) reaches `forward` only if it has an argument of
that name.

To the rest of shardwise the module then looks like the transformer. An `Adapted` module takes its place, with
the same parameters under the same names (models/replace.py), and its `forward` translates.

A loss is divided by the tokens that have a target, unless the module counts something else in a method
`count_items(inputs, targets)`: sequences, say, where it finds one class for each. It is a method and not a
second result of `forward`, because the first backward of a step is scaled by the count of the whole global
batch, when most forwards are still to come.

Mixed precision: shardwise's layers follow the dtype of their input, those of others do not. So in bfloat16
and float16 a module runs under torch's autocast, whether its weights are float32 masters (one device, zero =
0) or come cast from FSDP2. What `nn.Embedding` looks up is cast as in the transformer, since autocast would
leave the residual stream in float32 in one case and not in the other, and a layout would round differently
from one device. A plain `nn.Embedding` is replaced by the transformer's kind, which sums its gradient in
float32 (models/layers.py); one with options of its own keeps torch's sum, and a `Cast` takes its place.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import is_out_of_memory
from shardwise.config.model import Model
from shardwise.config.module_file import locate_module
from shardwise.errors import UserError
from shardwise.models.layers import Embedding
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement
from shardwise.models.torch_dtypes import wide
from shardwise.plurals import counted

OPTIONAL = ("documents", "positions", "logits_at")
"""Arguments that a module's forward may have or lack."""
WHAT_TO_RETURN = (
    "Return the loss, one number, summed over the targets that are not -100, for example "
    'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"): shardwise divides by the '
    "number of such targets "
    "in the global batch. If it is to be divided by something else, add a method count_items(inputs, "
    "targets) that says by what"
)
"""Advice for a `forward` that returns something else where it gets targets."""
MIXED = (torch.bfloat16, torch.float16)
"""Dtypes to compute in while weights are kept in float32."""


def build_own(model: Model) -> nn.Module:
    """Call what `model.module` names; inside of `weights_without_memory()`, whoever calls this sees to
    that."""
    make, where = _find(model), f"model.module = {model.module!r}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error", message=".*copying from a non-meta parameter"
            )  # which would do nothing
            module = make(model)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{where}: one weight alone takes more than this machine's memory ({_line(error, model)}); a "
                f"constructor "
                "makes one at a time, so make it in parts"
            ) from error
        raise UserError(
            f"{where}: could not be built: {type(error).__name__}: {error} ({_line(error, model)}). It is "
            f"called with the "
            "[model] section; its weights are on torch's meta device, without values, and get them "
            "later from "
            "initial_value(name, shape, seed), also those of a pretrained part (docs/sharding.md)"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(
            f"{where}: gave {type(module).__name__}, not a torch.nn.Module; name a class or a function that "
            f"makes one"
        )
    return module


def _find(model: Model) -> Callable[[Model], Any]:
    path, name = locate_module(model)
    where, file = f"model.module = {model.module!r}", path.name
    try:
        loaded = _load(path)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{where}: {file} could not be run: {type(error).__name__}: {error} ({_line(error, model)})"
        ) from error
    make = getattr(loaded, name, None)
    if not callable(make):
        names = [
            key
            for key, value in vars(loaded).items()
            if getattr(value, "__module__", None) == loaded.__name__
        ]
        raise UserError(
            f"{where}: {file} has no class or function {name}; it has {', '.join(names) or 'none at all'}"
        )
    return make  # type: ignore[no-any-return]


@cache
def _load(path: Path) -> ModuleType:
    """Run a Python file once, as an import would; files beside it can be imported from it."""
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; its name must end in .py")
    loaded = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[loaded.__name__] = loaded  # dataclasses and the compiler look for it there
    spec.loader.exec_module(loaded)
    return loaded


def _line(error: BaseException, model: Model) -> str:
    """Where an exception came from: the last line of the user's own file that was on the way to it."""
    file = str(Path(str(model.module).rpartition(":")[0]).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file


def accepted(module: nn.Module) -> set[str]:
    """Return those of the optional arguments that the forward of a user's module has."""
    if isinstance(module, Adapted):
        return module.accepted_arguments
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in OPTIONAL if takes_any or name in parameters}


def counts_items(module: nn.Module) -> bool:
    """Whether the module says itself what its loss is divided by."""
    return hasattr(module, "count_items")


def count_items(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """How many items the module's loss of these sequences is a sum over: one number, where the inputs are,
    not waited for."""
    given = module.count_items(inputs, targets)  # type: ignore[operator]
    count = torch.as_tensor(given, device=inputs.device) if isinstance(given, Tensor | int | float) else None
    senseless = isinstance(given, int | float) and not 0 <= given < math.inf
    if count is None or count.ndim or senseless:
        what = (
            str(given)
            if senseless
            else type(given).__name__
            if count is None
            else f"a tensor of shape {tuple(count.shape)}"
        )
        raise UserError(
            f"{name_of(module)}.count_items gave {what}; it must give one number, how many items the "
            f"loss of these targets "
            "is a sum over, for example (targets[:, -1] != -100).sum()"
        )
    return count.double()


class Adapted(Replacement):
    """A user's module that is called as the transformer is, and computes in the dtype of the job."""

    adapted_name: str
    """The name of the user's class, for messages."""
    adapted_dtype: torch.dtype
    accepted_arguments: set[str]
    """Those of the optional arguments that the user's forward has."""

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        logits_at: int | None = None,
    ) -> Tensor:
        """The loss, or without targets the logits, which the user's forward returns for the arguments that it
        has."""
        given = {"documents": documents, "positions": positions, "logits_at": logits_at}
        known, dtype = self.accepted_arguments, self.adapted_dtype
        more = {name: value for name, value in given.items() if value is not None and name in known}
        with _mixed(inputs.device.type, dtype):
            result = super().forward(inputs, targets, **more)
        if targets is not None:
            return _checked_loss(result, self.adapted_name).to(wide(dtype))
        logits = _checked_logits(result, self.adapted_name).to(dtype)
        chosen = None if "logits_at" in known else logits_at
        return logits if chosen is None else _logits_at(logits, chosen, self.adapted_name)

    def extra_repr(self) -> str:
        """What the module says of itself, and what is done to its results."""
        autocast = "under autocast" if self.adapted_dtype in MIXED else "as it is"
        adapted = f"run {autocast}, logits in {_short(self.adapted_dtype)}"
        return join_texts(super().extra_repr(), adapted)


class Cast(Replacement):
    """An embedding with options of its own, whose vectors are cast to the computing dtype."""

    cast_dtype: torch.dtype

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The embedding's own, cast."""
        return super().forward(*inputs, **named).to(self.cast_dtype)

    def extra_repr(self) -> str:
        """What the embedding says of itself, and the dtype of its vectors."""
        return join_texts(super().extra_repr(), f"cast to {_short(self.cast_dtype)}")


def adapt(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module that takes the place of a user's: it is called as the transformer is, and computes in
    that dtype."""
    replacements: dict[nn.Module, nn.Module] = {}
    if dtype in MIXED:
        embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        replacements = {part: _in_dtype(part, dtype) for part in embeddings}
    replacements[module] = replacement(
        replacements.get(module, module),
        Adapted,
        adapted_name=type(module).__name__,
        adapted_dtype=dtype,
        accepted_arguments=accepted(module),
    )
    return put_in_place(module, replacements)


def _in_dtype(part: nn.Embedding, dtype: torch.dtype) -> nn.Module:
    """Return an embedding that takes the place of this one and gives vectors in that dtype."""
    return Embedding.of(part) if _is_plain(part) else replacement(part, Cast, cast_dtype=dtype)


def name_of(module: nn.Module) -> str:
    """Return the name of a module's class, which is the user's where it is a user's module."""
    return module.adapted_name if isinstance(module, Adapted) else type(module).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_plain(part: nn.Module) -> bool:
    """An embedding without behaviour of its own."""
    return (
        type(part) is nn.Embedding
        and part.max_norm is None
        and not part.scale_grad_by_freq
        and not part.sparse
    )


def _mixed(device_type: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if dtype not in MIXED or device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, dtype)


def _checked_logits(result: Any, name: str) -> Tensor:
    if isinstance(result, Tensor) and result.ndim >= 2:
        return result
    raise UserError(
        f"{name}.forward must return logits (batch, sequence, vocabulary) where it gets no targets"
    )


def _logits_at(logits: Tensor, position: int, name: str) -> Tensor:
    if logits.shape[1] <= position:
        raise UserError(
            f"{name}.forward gave logits of {counted(logits.shape[1], 'position')} of a longer sequence; "
            "without targets it must return (batch, sequence, vocabulary), to be sampled from"
        )
    return logits[:, position]


def _checked_loss(result: Any, name: str) -> Tensor:
    if isinstance(result, Tensor) and result.ndim == 0:
        return result
    returned = (
        f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    )
    raise UserError(f"{name}.forward returned {returned} where it got targets. {WHAT_TO_RETURN}")
