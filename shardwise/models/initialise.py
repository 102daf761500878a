"""First values of the weights: a function of (seed, parameter name, place in the parameter), and of nothing
else.

Each number is drawn by its index under a key that is a hash of the run's seed and the parameter's name
(models/draw.py). So the values do not depend on how many processes there are, in which order modules were
built, or which part of the model a process holds: any layout starts from the same bits. A process draws what
it holds and no more, on the device that holds it; no parameter is whole anywhere. Numbers are float32
whatever the dtype of the model, and rounded to it, so that a float64 proof starts from the same numbers as
the float32 run that it proves. A GPU takes some milliseconds a billion parameters, a CPU some seconds.

The distribution is GPT-2's: normal with deviation 0.02, and the matrices of a block that write to the
residual stream divided by sqrt(2 · layers), so that the stream's variance does not grow with depth; norms one
(zero where one is added), biases zero. A router's logits begin with variance one at any width, so that tokens
spread over the experts from the first step. A user's own module (models/user_module.py) may say otherwise, of
all or some weights, in a method `initial_value(name, shape, seed)`, which gives a parameter whole.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.config.model import Model
from shardwise.errors import UserError
from shardwise.models.draw import draw, quantiles
from shardwise.models.transformer import Transformer

DEVIATION = 0.02
WRITES_TO_STREAM = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.experts.down",
    "feed_forward.shared.down.weight",
)


Part = tuple[Tensor, tuple[slice, ...]]
"""What a process holds of a parameter, and which slice of it that is."""


def _all(parameter: Tensor) -> Part:
    return parameter, tuple(slice(0, size) for size in parameter.shape)


def _itself(parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def initialise(
    model: nn.Module,
    seed: int,
    part: Callable[[Tensor], Part] = _all,
    known_as: Callable[[str], str] = str,
    gpu: torch.device | None = None,
) -> None:
    """Give every parameter its first value; buffers have theirs from the constructor.

    `part(parameter)` is what this process holds of a parameter; whoever has sharded them knows.
    `known_as(name)` is the name of a parameter in the whole model, where this is a part of it. A `gpu` draws
    also what is kept in the host's memory.
    """
    config = model.config if isinstance(model, Transformer) else None
    normal = quantiles()
    for local_name, parameter in model.named_parameters():
        name, shape, (own, held) = known_as(local_name), tuple(parameter.shape), part(parameter)
        given = _given(model, name, shape, seed)
        if given is not None:
            own.copy_(given[held])
        elif config is not None and _is_offset(config, name):
            own.zero_()
        else:
            _fill(own, held, normal, name, shape, None if config is None else config.layers, seed, gpu)


def _given(model: nn.Module, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """What a user's own module says of a parameter, in float32; None: nothing."""
    own = getattr(model, "initial_value", None)
    value = None if own is None else own(name, shape, seed)
    if value is None:
        return None
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or not bool(value.isfinite().all()):
        given = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise UserError(
            f"initial_value({name!r}, {shape}, {seed}) gave {given}; it must give finite numbers of that "
            f"shape, or None: then "
            "they are drawn as without it"
        )
    return value.to("cpu", torch.float32)


def check_first_value(model: nn.Module, seed: int) -> None:
    """Ask a user's module for the smallest of its weights: a file that is not there is then known before
    anything is made."""
    name, parameter = min(model.named_parameters(), key=lambda named: named[1].numel())
    try:
        _given(model, name, tuple(parameter.shape), seed)
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        code = getattr(getattr(model, "initial_value", None), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        at = (own or frames)[-1]
        raise UserError(
            f"initial_value({name!r}, {tuple(parameter.shape)}, {seed}) fails: {type(error).__name__}: "
            f"{error} "
            f"({at.filename}, line {at.lineno})"
        ) from error


def begins_otherwise(model: nn.Module, name: str, value: float | None, seed: int) -> bool:
    """Whether a weight of a user's module begins with other values than its constructor gives. `value` is
    what all its numbers are there; None: they differ. What `initial_value` returns is taken for what the
    author wants."""
    shape = tuple(model.get_parameter(name).shape)
    if _given(model, name, shape, seed) is not None:
        return False
    return len(shape) > 1 or value != (0.0 if _is_bias(name) else 1.0)


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2].split(
        "_"
    )  # torch's own modules have in_proj_bias and bias_ih_l0 too


def _is_offset(config: Model, name: str) -> bool:
    """Whether one is added to this weight of a norm; never to those of queries and keys."""
    of_stream = name.endswith("norm.weight") and not name.endswith(("query_norm.weight", "key_norm.weight"))
    return config.norm == "rms+1" and of_stream


def initial_value(name: str, shape: tuple[int, ...], layers: int | None, seed: int) -> Tensor:
    """The whole first value of one parameter of a model with so many layers: float32, on the CPU. None: a
    module not of ours, whose matrices are all drawn alike.
    """
    whole, held = _all(torch.empty(shape, dtype=torch.float32, device="cpu"))
    _fill(whole, held, quantiles(), name, shape, layers, seed)
    return whole


def _fill(
    own: Tensor,
    held: tuple[slice, ...],
    normal: Tensor,
    name: str,
    shape: tuple[int, ...],
    layers: int | None,
    seed: int,
    gpu: torch.device | None = None,
) -> None:
    if len(shape) <= 1:
        own.fill_(0.0 if _is_bias(name) else 1.0)  # one: the weight of a norm
    else:
        draw(own, normal * _deviation(name, shape, layers), seed, name, shape, held, gpu)


def _deviation(name: str, shape: tuple[int, ...], layers: int | None) -> float:
    if name.endswith("feed_forward.router.weight"):
        return 1 / math.sqrt(shape[1])
    return DEVIATION / math.sqrt(2 * layers) if layers and name.endswith(WRITES_TO_STREAM) else DEVIATION


@torch.no_grad()
def check_values(model: nn.Module, local: Callable[[Tensor], Tensor] = _itself) -> None:
    """Fail, naming the parameters, if any holds NaN or infinity, or a matrix holds only zeros: a value was
    never given.

    One reduction a parameter and one read-back in all. `local(parameter)` gives the part that this process
    holds.
    """
    parts = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    if not parts:
        return
    # The largest magnitude says it all: it is NaN or infinite if any value is, and zero only if all are.
    peaks = torch.stack(
        [torch.linalg.vector_norm(part, math.inf).double() for part in parts.values()]
    ).tolist()
    wrong = [
        fault
        for (name, part), peak in zip(parts.items(), peaks, strict=True)
        if (fault := _fault(name, part, peak))
    ]
    if wrong:
        raise AssertionError("parameters without sound values: " + "; ".join(wrong))


def _fault(name: str, part: Tensor, peak: float) -> str | None:
    if not math.isfinite(peak):
        return f"{name} holds NaN or infinity"
    return f"{name} is all zero" if peak == 0 and part.ndim >= 2 else None
