"""Initial values of the weights: a function of (seed, parameter name, index in the parameter) alone.

Each number is drawn by its index under a key that is a hash of the run's seed and the parameter's name
(models/draw.py). So the values do not depend on how many processes there are, in which order modules were
built, or which part of the model a process holds: any layout starts from the same bits. A process draws only
what it holds, on the device that holds it; no parameter is whole anywhere. Numbers are drawn in float32 and
rounded to the dtype of the model, so that a float64 proof starts from the same numbers as the float32 run
that it proves. A billion parameters take a GPU some milliseconds and a CPU some seconds.

The distribution is GPT-2's: normal with deviation 0.02; matrices of a block that write to the residual stream
are divided by sqrt(2 · layers), so that the stream's variance does not grow with depth. Norms begin at one
(zero where one is added), biases at zero. A router's logits begin with variance one at any width, so that
tokens spread over the experts from the first step. A user's module begins with the values of its
constructor instead, or with those that its method `initial_value(name, shape, seed)` returns.
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


def _whole(parameter: Tensor) -> Part:
    return parameter, tuple(slice(0, size) for size in parameter.shape)


def _identity(parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def initialise(
    model: nn.Module,
    seed: int,
    part: Callable[[Tensor], Part] = _whole,
    full_name: Callable[[str], str] = str,
    gpu: torch.device | None = None,
) -> None:
    """Give every parameter its initial value; buffers have theirs from the constructor.

    `part(parameter)` returns what this process holds of a parameter, and `full_name(name)` the parameter's
    name in the whole model. A `gpu` also draws parameters that are in the host's memory.
    """
    config = model.config if isinstance(model, Transformer) else None
    normal = quantiles()
    for local_name, parameter in model.named_parameters():
        name, shape, (local, held) = full_name(local_name), tuple(parameter.shape), part(parameter)
        value = _value_from_module(model, name, shape, seed)
        if value is not None:
            local.copy_(value[held])
        elif config is not None and _is_offset(config, name):
            local.zero_()
        else:
            _fill(local, held, normal, name, shape, None if config is None else config.layers, seed, gpu)


def _value_from_module(model: nn.Module, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """Return the value that a user's module gives a parameter, in float32; None: it gives none."""
    method = getattr(model, "initial_value", None)
    value = None if method is None else method(name, shape, seed)
    if value is None:
        return None
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or not bool(value.isfinite().all()):
        returned = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise UserError(
            f"initial_value({name!r}, {shape}, {seed}) returned {returned}; it must return finite numbers of "
            "that shape, or None to let shardwise draw them"
        )
    return value.to("cpu", torch.float32)


def has_initial_value(model: nn.Module) -> bool:
    """Return whether a user's module gives its first weights itself, by a method `initial_value`."""
    return hasattr(model, "initial_value")


def check_first_value(model: nn.Module, seed: int) -> None:
    """Ask a user's module for the smallest of its weights, so that a missing file is reported early."""
    name, parameter = min(model.named_parameters(), key=lambda named: named[1].numel())
    try:
        _value_from_module(model, name, tuple(parameter.shape), seed)
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        code = getattr(getattr(model, "initial_value", None), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        at = (user_frames or frames)[-1]
        raise UserError(
            f"initial_value({name!r}, {tuple(parameter.shape)}, {seed}) fails: {type(error).__name__}: "
            f"{error} ({at.filename}, line {at.lineno})"
        ) from error


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2].split("_")  # torch has in_proj_bias and bias_ih_l0 too


def _is_offset(config: Model, name: str) -> bool:
    """Return whether one is added to this weight of a norm; it never is in norms of queries and keys."""
    of_stream = name.endswith("norm.weight") and not name.endswith(("query_norm.weight", "key_norm.weight"))
    return config.norm == "rms+1" and of_stream


def initial_value(name: str, shape: tuple[int, ...], layers: int | None, seed: int) -> Tensor:
    """Return the whole initial value of a parameter, in float32 on the CPU.

    `layers` is the number of layers of a transformer; None: another module, whose matrices are all drawn with
    one deviation.
    """
    whole, held = _whole(torch.empty(shape, dtype=torch.float32, device="cpu"))
    _fill(whole, held, quantiles(), name, shape, layers, seed)
    return whole


def _fill(
    local: Tensor,
    held: tuple[slice, ...],
    normal: Tensor,
    name: str,
    shape: tuple[int, ...],
    layers: int | None,
    seed: int,
    gpu: torch.device | None = None,
) -> None:
    if len(shape) <= 1:
        local.fill_(0.0 if _is_bias(name) else 1.0)  # one: the weight of a norm
    else:
        draw(local, normal * _deviation(name, shape, layers), seed, name, shape, held, gpu)


def _deviation(name: str, shape: tuple[int, ...], layers: int | None) -> float:
    if name.endswith("feed_forward.router.weight"):
        return 1 / math.sqrt(shape[1])
    return DEVIATION / math.sqrt(2 * layers) if layers and name.endswith(WRITES_TO_STREAM) else DEVIATION


@torch.no_grad()
def check_values(model: nn.Module, local: Callable[[Tensor], Tensor] = _identity) -> None:
    """Raise if a parameter holds NaN or infinity, or a matrix only zeros: then its value was never set.

    It costs one reduction per parameter and one read from the device. `local(parameter)` returns the part
    that this process holds.
    """
    parts = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    if not parts:
        return
    # The largest magnitude is NaN or infinite if any value is, and zero only if all are.
    norms = [torch.linalg.vector_norm(part, math.inf).double() for part in parts.values()]
    pairs = zip(parts.items(), torch.stack(norms).tolist(), strict=True)
    faults = [fault for (name, part), peak in pairs if (fault := _fault(name, part, peak))]
    if faults:
        raise AssertionError("parameters without sound values: " + "; ".join(faults))


def _fault(name: str, part: Tensor, peak: float) -> str | None:
    if not math.isfinite(peak):
        return f"{name} holds NaN or infinity"
    return f"{name} is all zero" if peak == 0 and part.ndim >= 2 else None
