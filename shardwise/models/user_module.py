"""A user's `nn.Module` in place of the transformer: `[model] module = "file.py:Class"`.

The file is run once per process; its class (or function) is called with the job's `Model` section, inside a
context that builds a model of any size without memory for its weights (models/unallocated.py). The module is
trained like the transformer, provided that it keeps the contract of docs/sharding.md: `forward(inputs,
targets)` returns the loss summed over targets, `forward(inputs, None)` the logits. Other arguments
(documents, positions, the position to sample from) are passed only if `forward` has an argument of that name.

To the rest of shardwise the module then looks like the transformer: an `Adapted` module takes its place, with
the same parameters under the same names (models/replace.py), and its `forward` translates the arguments.

A loss is divided by the number of tokens with a target, unless the module counts something else in a method
`count_items(inputs, targets)`: sequences, say, if it predicts one class for each. It is a method and not a
second result of `forward`, because the first backward of a step is scaled by the count of the whole global
batch, before most forwards.

Mixed precision: shardwise's layers follow the dtype of their input; other layers do not. So in bfloat16 and
float16 a module runs under torch's autocast, whether its weights are float32 masters (one device, zero = 0)
or arrive cast from FSDP2. The vectors of an `nn.Embedding` are cast as in the transformer: autocast would
leave the residual stream in float32 in one of the two cases, and layouts would round differently. A plain
`nn.Embedding` is replaced by the transformer's kind, which sums its gradient in float32 (models/layers.py);
an embedding with further options keeps torch's sum, and a `Cast` takes its place.
"""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

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
from shardwise.user_file import load_file

OPTIONAL = ("documents", "positions", "logits_at")
"""Arguments that a module's forward may have or lack."""
WHAT_TO_RETURN = (
    "Return the loss, one number, summed over the targets that are not -100, for example "
    'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"): shardwise divides by the '
    "number of such targets in the global batch. To divide by something else, add a method "
    "count_items(inputs, targets) that returns the divisor"
)
"""Advice for a `forward` that returns something else where it gets targets."""
MIXED = (torch.bfloat16, torch.float16)
"""Computing dtypes for which master weights are float32."""


def build_user_module(model: Model) -> nn.Module:
    """Return a new module of the class that `model.module` names."""
    make, where = _constructor(model), f"model.module = {model.module!r}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            module = make(model)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{where}: one weight alone takes more than this machine's memory "
                f"({_location(error, model)}); a constructor makes one at a time, so make it in parts"
            ) from error
        raise UserError(
            f"{where}: could not be built: {type(error).__name__}: {error} ({_location(error, model)}). "
            "The class is called with the [model] section. Before training its weights are on torch's meta "
            "device, so a constructor must not read them (docs/sharding.md)"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(
            f"{where}: returned {type(module).__name__}, not a torch.nn.Module; name a class or a function "
            "that makes one"
        )
    return module


def _constructor(model: Model) -> Callable[[Model], object]:
    path, name = locate_module(model)
    where, file = f"model.module = {model.module!r}", path.name
    try:
        loaded = load_file(path)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{where}: {file} could not be run: {type(error).__name__}: {error} ({_location(error, model)})"
        ) from error
    make = getattr(loaded, name, None)
    if not callable(make):
        contents = vars(loaded).items()
        names = [key for key, value in contents if getattr(value, "__module__", None) == loaded.__name__]
        raise UserError(
            f"{where}: {file} has no class or function {name}; it has {', '.join(names) or 'none at all'}"
        )
    return make  # type: ignore[no-any-return]


def _location(error: BaseException, model: Model) -> str:
    """Return the last line of the user's file in the traceback of an exception."""
    file = str(Path(str(model.module).rpartition(":")[0]).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file


def accepted_arguments(module: nn.Module) -> set[str]:
    """Return the optional arguments that the forward of a user's module has."""
    if isinstance(module, Adapted):
        return module.accepted_arguments
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in OPTIONAL if takes_any or name in parameters}


def counts_items(module: nn.Module) -> bool:
    """Return whether the module itself counts what its loss is divided by."""
    return hasattr(module, "count_items")


def count_items(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the number of items in the module's loss of these sequences: a tensor on the inputs' device,
    without waiting for it."""
    result = module.count_items(inputs, targets)  # type: ignore[operator]
    if isinstance(result, Tensor | int | float):
        count = torch.as_tensor(result, device=inputs.device)
        if isinstance(result, Tensor):
            fault = f"a tensor of shape {tuple(count.shape)}" if count.ndim else None
        else:
            fault = None if 0 <= result < math.inf else str(result)
        if fault is None:
            return count.double()
    else:
        fault = type(result).__name__
    raise UserError(
        f"{name_of(module)}.count_items returned {fault}; it must return one number, the number of items in "
        "the loss of these targets, for example (targets[:, -1] != -100).sum()"
    )


class Adapted(Replacement):
    """A user's module that is called as the transformer is, and computes in the dtype of the job."""

    adapted_name: str
    """The name of the user's class, for messages."""
    adapted_dtype: torch.dtype
    accepted_arguments: set[str]
    """Names of the optional arguments that the user's forward has."""

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        logits_at: int | None = None,
    ) -> Tensor:
        """Return the loss, or without targets the logits, of the user's forward, called with the arguments
        that it has."""
        given = {"documents": documents, "positions": positions, "logits_at": logits_at}
        known, dtype = self.accepted_arguments, self.adapted_dtype
        more = {name: value for name, value in given.items() if value is not None and name in known}
        with mixed_precision(inputs.device.type, dtype):
            result = super().forward(inputs, targets, **more)
        if targets is not None:
            return _checked_loss(result, self.adapted_name).to(wide(dtype))
        logits = _checked_logits(result, self.adapted_name).to(dtype)
        chosen = None if "logits_at" in known else logits_at
        return logits if chosen is None else _logits_at(logits, chosen, self.adapted_name)

    def extra_repr(self) -> str:
        """Return the module's own description, and how it is run."""
        autocast = "under autocast" if self.adapted_dtype in MIXED else "as it is"
        adapted = f"run {autocast}, logits in {_short(self.adapted_dtype)}"
        return join_texts(super().extra_repr(), adapted)


class Cast(Replacement):
    """An embedding with further options, whose vectors are cast to the computing dtype."""

    cast_dtype: torch.dtype

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Return the embedding's vectors, cast."""
        vectors: Tensor = super().forward(*inputs, **named)
        return vectors.to(self.cast_dtype)

    def extra_repr(self) -> str:
        """Return the embedding's own description, and the dtype of its vectors."""
        return join_texts(super().extra_repr(), f"cast to {_short(self.cast_dtype)}")


def with_embeddings_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the module with embeddings whose vectors have the dtype that it computes in."""
    replacements: dict[nn.Module, nn.Module] = {}
    if dtype in MIXED:
        embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        replacements = {part: _in_dtype(part, dtype) for part in embeddings}
    return put_in_place(module, replacements)


def adapt(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module that takes the place of a user's module: it is called like the transformer, and
    computes in that dtype."""
    module = with_embeddings_in(module, dtype)
    adapted = replacement(
        module,
        Adapted,
        adapted_name=type(module).__name__,
        adapted_dtype=dtype,
        accepted_arguments=accepted_arguments(module),
    )
    return put_in_place(module, {module: adapted})


def _in_dtype(part: nn.Embedding, dtype: torch.dtype) -> nn.Module:
    """Return an embedding that takes the place of this one and whose vectors have that dtype."""
    return Embedding.from_plain(part) if _is_plain(part) else replacement(part, Cast, cast_dtype=dtype)


def name_of(module: nn.Module) -> str:
    """Return the name of a module's class; for an adapted module, that of the user's class."""
    name: str = getattr(module, "adapted_name", type(module).__name__)
    return name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_plain(part: nn.Module) -> bool:
    """Return whether an embedding has none of the further options of `nn.Embedding`."""
    if type(part) is not nn.Embedding:
        return False
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


def mixed_precision(device_type: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return the context in which a user's module computes in this dtype."""
    if dtype not in MIXED or device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, dtype)


def _checked_logits(result: object, name: str) -> Tensor:
    if isinstance(result, Tensor) and result.ndim >= 2:
        return result
    raise UserError(
        f"{name}.forward must return logits (batch, sequence, vocabulary) where it gets no targets"
    )


def _logits_at(logits: Tensor, position: int, name: str) -> Tensor:
    if logits.shape[1] <= position:
        raise UserError(
            f"{name}.forward returned logits of {counted(logits.shape[1], 'position')} of a longer sequence; "
            "without targets it must return (batch, sequence, vocabulary), to be sampled from"
        )
    return logits[:, position]


def _checked_loss(result: object, name: str) -> Tensor:
    if isinstance(result, Tensor) and result.ndim == 0:
        return result
    returned = (
        f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    )
    raise UserError(f"{name}.forward returned {returned} where it got targets. {WHAT_TO_RETURN}")
