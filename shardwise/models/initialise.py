"""First values of the weights: a function of (seed, parameter name), and of nothing else.

Each parameter has a random generator of its own, seeded by a hash of the run's seed and the parameter's name. So the values
do not depend on how many processes there are, in which order modules were built, or which part of the model a process holds:
any layout starts from the same bits. Values are drawn on the CPU in float32 whatever the dtype and device of the model, so
that a float64 proof starts from the same numbers as the float32 run that it proves. At most one full-size parameter is in
memory beside the model. The cost is time on the CPU, some seconds a billion parameters.

The distribution is GPT-2's: normal with deviation 0.02, and the matrices of a block that write to the residual stream
divided by sqrt(2 · layers), so that the stream's variance does not grow with depth; norms one (zero where one is added), biases
zero. A router's
logits begin with variance one at any width, so that tokens spread over the experts from the first step. A user's own module
(models/own.py) may say otherwise, of all or some weights, in a method `initial_value(name, shape, seed)`.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.models.transformer import Transformer

DEVIATION = 0.02
WRITES_TO_STREAM = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.experts.down",
    "feed_forward.shared.down.weight",
)


def _copy(parameter: Tensor, full: Tensor) -> None:
    parameter.copy_(full)


def _itself(parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def initialise(
    model: nn.Module,
    seed: int,
    assign: Callable[[Tensor, Tensor], None] = _copy,
    known_as: Callable[[str], str] = str,
) -> None:
    """Give every parameter its first value; buffers have theirs from the constructor.

    `assign(parameter, full)` stores a full-size float32 CPU tensor into a parameter; whoever has sharded the parameters
    passes one that keeps this process's part. `known_as(name)` is the name of a parameter in the whole model, where this is a
    part of it.
    """
    for name, parameter in model.named_parameters():
        assign(parameter, _first_value(model, known_as(name), tuple(parameter.shape), seed))


def _first_value(model: nn.Module, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    own = getattr(model, "initial_value", None)
    value = None if own is None else own(name, shape, seed)
    if value is None:
        value = initial_value(name, shape, model.config.layers if isinstance(model, Transformer) else None, seed)
        return value.zero_() if isinstance(model, Transformer) and _is_offset(model, name) else value
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or not bool(value.isfinite().all()):
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(
            f"initial_value({name!r}, {shape}, {seed}) gave {given}; it must give finite numbers of that shape, or None: then "
            "they are drawn as without it"
        )
    return value.to("cpu", torch.float32)


def check_first_value(model: nn.Module, seed: int) -> None:
    """Ask a user's module for the smallest of its weights: a file that is not there is then known before anything is made."""
    name, parameter = min(model.named_parameters(), key=lambda named: named[1].numel())
    try:
        _first_value(model, name, tuple(parameter.shape), seed)
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        code = getattr(getattr(model, "initial_value", None), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        at = (own or frames)[-1]
        raise UserError(
            f"initial_value({name!r}, {tuple(parameter.shape)}, {seed}) fails: {type(error).__name__}: {error} "
            f"({at.filename}, line {at.lineno})"
        ) from error


def _is_offset(model: Transformer, name: str) -> bool:
    """Whether one is added to this weight of a norm; never to those of queries and keys."""
    of_stream = name.endswith("norm.weight") and not name.endswith(("query_norm.weight", "key_norm.weight"))
    return model.config.norm == "rms+1" and of_stream


def initial_value(name: str, shape: tuple[int, ...], layers: int | None, seed: int) -> Tensor:
    """The full first value of one parameter of a model with so many layers: float32, on the CPU. None: a module not of ours,
    whose matrices are all drawn alike.
    """
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    if len(shape) <= 1:
        bias = "bias" in name.rpartition(".")[2].split("_")  # torch's own modules have in_proj_bias and bias_ih_l0 too
        return full.zero_() if bias else full.fill_(1.0)  # the weight of a norm
    deviation = DEVIATION / math.sqrt(2 * layers) if layers and name.endswith(WRITES_TO_STREAM) else DEVIATION
    if name.endswith("feed_forward.router.weight"):
        deviation = 1 / math.sqrt(shape[1])
    return full.normal_(0.0, deviation, generator=_generator(seed, name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def check_values(model: nn.Module, local: Callable[[Tensor], Tensor] = _itself) -> None:
    """Fail, naming the parameters, if any holds NaN or infinity, or a matrix holds only zeros: a value was never given.

    One reduction a parameter and one read-back in all. `local(parameter)` gives the part that this process holds.
    """
    parts = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    if not parts:
        return
    # The largest magnitude says it all: it is NaN or infinite if any value is, and zero only if all are.
    peaks = torch.stack([torch.linalg.vector_norm(part, math.inf).double() for part in parts.values()]).tolist()
    wrong = [fault for (name, part), peak in zip(parts.items(), peaks, strict=True) if (fault := _fault(name, part, peak))]
    if wrong:
        raise AssertionError("parameters without sound values: " + "; ".join(wrong))


def _fault(name: str, part: Tensor, peak: float) -> str | None:
    if not math.isfinite(peak):
        return f"{name} holds NaN or infinity"
    return f"{name} is all zero" if peak == 0 and part.ndim >= 2 else None
