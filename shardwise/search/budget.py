"""The best use of a compute budget: size of model, number of tokens, expected loss, hours, energy and money.

A model of N parameters trained on D tokens costs about C = 6 N D FLOPs (2 a weight forward, 4 backward) and
ends, as Hoffmann et al. (2022, "Chinchilla") found by training 400 models, near the loss

    L(N, D) = E + A / N^α + B / D^β

E is the loss of a perfect model of that text, the second term the cost of a small model, the third that of
few tokens. With C given, D = C / 6N, and the derivative vanishes where α A / N^α = β B / D^β:

    N = G (C/6)^(β/(α+β)),    D = (C/6)^(α/(α+β)) / G,    G = (α A / β B)^(1/(α+β))

At the optimum both terms fall with the same power of C, so its loss is E + K (C/6)^(-αβ/(α+β)). The compute
for a given loss therefore has a closed form too.

There are two sets of constants, because the published one does not agree with its own paper. By two of the
paper's three methods, and in the model that it then trained, D ≈ 20 N at every budget. By the constants that
it prints for the third, D is 93 N at Gopher's budget, and more above. Besiroglu et al. (2024, "Chinchilla
Scaling: A replication attempt") read the runs off its plots and fitted them again: the paper's fit had
stopped early and was printed with too few digits. Their optimum is near the rule, with 18 N at that budget.
So the answer here is the rule, with the loss by the constants of the paper, and the optima of both fits
beside it. The minimum is flat: at that budget 10 tokens per parameter waste 3 % of the compute, 40 waste 5 %.

The loss is in nats per token of their text and vocabulary (32,000). It can compare budgets, but does not
predict the loss with another tokenizer. All of this holds for dense models that see each token once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.config import Model
from shardwise.config.parameters import count
from shardwise.errors import UserError
from shardwise.files import Json

TOKENS_PER_PARAMETER = 20.0
"""Tokens per parameter by the rule of Hoffmann et al.: their methods 1 and 2, table 3, and Chinchilla itself
(70B on 1.4T)."""


# -- the law of the loss -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """Constants of the law L = E + A / N^α + B / D^β."""

    name: str
    floor: float
    """E, the loss that remains with endless parameters and tokens."""
    parameters: float
    """A, the scale of what too few parameters cost."""
    tokens: float
    """B, the scale of what too few tokens cost."""
    parameters_power: float
    """α, the power of the number of parameters."""
    tokens_power: float
    """β, the power of the number of tokens."""

    @property
    def balance(self) -> float:
        """G, the number of parameters at the optimum over its power of the compute."""
        alpha, beta = self.parameters_power, self.tokens_power
        return math.pow(alpha * self.parameters / (beta * self.tokens), 1 / (alpha + beta))


HOFFMANN = Law("Hoffmann et al. 2022", 1.69, 406.4, 410.7, 0.34, 0.28)
BESIROGLU = Law("Besiroglu et al. 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)


@dataclass(frozen=True)
class Allocation:
    """Parameters and tokens, and the loss that a law predicts for them."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Optimum:
    """The model and the tokens to train with a budget: by 20 tokens per parameter, and by the two fits."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    """Predicted loss by the constants of Hoffmann et al."""
    fitted: Allocation
    """The optimum of the constants of Hoffmann et al.: smaller models, more tokens."""
    replicated: Allocation
    """The optimum of the constants of Besiroglu et al., with their loss."""


@dataclass(frozen=True)
class Spent:
    """The result of spending a budget on a model of a given size, and how well it is spent."""

    parameters: float
    tokens: float
    loss: float
    """Predicted loss by the constants of Hoffmann et al."""
    tokens_per_parameter: float
    useful: float
    """Fraction of the budget with which the best size reaches the same loss, by the constants of Besiroglu et
    al. (their best size is that of the rule). Below 1 the model is too small (over 20 tokens per parameter)
    or too large."""


def loss(law: Law, parameters: float, tokens: float) -> float:
    """Return the loss that a law predicts."""
    small = law.parameters / math.pow(parameters, law.parameters_power)
    short = law.tokens / math.pow(tokens, law.tokens_power)
    return law.floor + small + short


def optimum(law: Law, flops: float) -> Allocation:
    """Return the parameters and tokens with the lowest loss among all that cost 6 N D = flops."""
    alpha, beta = law.parameters_power, law.tokens_power
    parameters = law.balance * math.pow(flops / 6, beta / (alpha + beta))
    tokens = flops / 6 / parameters
    return Allocation(parameters, tokens, loss(law, parameters, tokens))


def chinchilla(flops: float) -> Optimum:
    """Return the parameters and tokens to train with this many FLOPs."""
    parameters = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    tokens = TOKENS_PER_PARAMETER * parameters
    best = loss(HOFFMANN, parameters, tokens)
    return Optimum(flops, parameters, tokens, best, optimum(HOFFMANN, flops), optimum(BESIROGLU, flops))


def flops_for(law: Law, wanted: float) -> float:
    """Return the FLOPs with which the optimum of a law reaches this loss; infinite at its floor or below."""
    if wanted <= law.floor:
        return math.inf
    alpha, beta = law.parameters_power, law.tokens_power
    scale = law.parameters * math.pow(law.balance, -alpha) + law.tokens * math.pow(law.balance, beta)
    return 6 * math.pow(scale / (wanted - law.floor), (alpha + beta) / (alpha * beta))


def of_a_size(parameters: float, flops: float) -> Spent:
    """Return what a budget does for a model of a given size."""
    tokens = flops / 6 / parameters
    useful = min(1.0, flops_for(BESIROGLU, loss(BESIROGLU, parameters, tokens)) / flops)
    return Spent(parameters, tokens, loss(HOFFMANN, parameters, tokens), tokens / parameters, useful)


# -- time, energy, money -------------------------------------------------------------------------------------

NODE_POWER = 1.5
"""Power of a whole node over the rated power of its devices, in training: processors, memory, network, fans
and power supplies. A node of eight H100 (5.6 kW of devices) was measured at up to 8.4 kW of its rated 10.2
(Latif et al. 2025)."""

BUILDING_POWER = 1.2
"""Power of a data centre over that of its machines (PUE): cooling and losses. Large operators report 1.1, the
average is 1.6."""

_HOUR, _DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class Bill:
    """What training costs. Energy and money are None where the power or the price is unknown."""

    seconds: float
    device_hours: float
    kwh: float | None
    money: float | None


def compute_of(days: float, devices: int, flops_per_second_per_device: float) -> float:
    """Return the FLOPs that devices complete in this many days at their training speed (peak x
    utilisation)."""
    return days * _DAY * devices * flops_per_second_per_device


def cost(
    flops: float,
    flops_per_second_per_device: float,
    devices: int,
    watts: float | None = None,
    price: float | None = None,
) -> Bill:
    """Return the time, energy and money for this many FLOPs.

    `watts` is the rated power of one device, to which the rest of its node and of the building are added
    (`NODE_POWER`, `BUILDING_POWER`); `price` is that of one device for an hour.
    """
    seconds = flops / (flops_per_second_per_device * devices)
    hours = seconds / _HOUR * devices
    kwh = None if watts is None else hours * watts / 1000 * NODE_POWER * BUILDING_POWER
    return Bill(seconds, hours, kwh, None if price is None else hours * price)


# -- a shape with about a given number of parameters ---------------------------------------------------------

WIDTH_PER_LAYER = 120.0
"""Width over layers: between 102 (70B) and 130 (405B) in Llama 3."""

FFN_PER_WIDTH = 3.5
"""Width of the feed-forward layer over that of the model: 3.25 (405B) to 4 (1B) in Llama 3."""

SMALL_HEADS_BELOW = 1.5e9
TIED_BELOW = 4e9
"""Llama 3 and Qwen 3 use one matrix for embedding and head below this size, where it would be a large part of
the model."""

NEAR = 0.02
"""Relative distance from the wanted number of parameters that is close enough; among such shapes the
proportions decide."""

_TOO_FAR = 0.25


def shape_for(parameters: float, vocabulary: int) -> Json:
    """Return a Llama-like [model] of about this many parameters: within 5 % from 100M to 1T, for a vocabulary
    that leaves room for it.

    Heads are a multiple of 8 and key-value heads are 8, so the tensor axis may be 2, 4 or 8; layers are even,
    too.
    """
    (off, _), best = min(_shapes(parameters, vocabulary), key=lambda judged: judged[0])
    if off > _TOO_FAR:
        nearest = count(Model.model_validate(best))
        raise UserError(
            f"no usual shape has about {parameters:,.0f} parameters and a vocabulary of {vocabulary:,}: the "
            f"nearest has {nearest:,}; give another model.vocabulary or another budget"
        )
    return best


def _shapes(parameters: float, vocabulary: int) -> Iterator[tuple[tuple[float, float], Json]]:
    """Yield, for each width and each feed-forward width that Llama 3 would have there, the number of layers
    that fits best; each with the errors of its count and of its proportions."""
    head_dim = 64 if parameters < SMALL_HEADS_BELOW else 128
    rest = {"kv_heads": 8, "head_dim": head_dim, "vocabulary": vocabulary, "tied": parameters < TIED_BELOW}
    for hidden in _widths():
        heads = 8 * math.ceil(hidden / head_dim / 8)
        step = max(256, hidden // 4096 * 256)
        for ffn in range(math.ceil(3.25 * hidden / step) * step, 4 * hidden + 1, step):
            shape: Json = {"hidden": hidden, "heads": heads, "ffn": ffn, **rest}
            first = count(Model.model_validate({"layers": 1, **shape}))
            layer = count(Model.model_validate({"layers": 2, **shape})) - first
            layers = _round_layers(min(1 + (parameters - first) / layer, hidden / 16))
            off = abs(math.log((first + (layers - 1) * layer) / parameters))
            yield (max(off, NEAR), _unlike(layers, hidden, ffn)), {"layers": layers, **shape}


def _widths() -> Iterator[int]:
    """Yield round widths, rounder as they grow: multiples of 256 up to 2048, of 512 up to 4096, of 1024 up to
    8192…"""
    yield from (256, 512, 768)
    for doubling in range(6):
        yield from (quarters * 256 * 2**doubling for quarters in (4, 5, 6, 7))


def _round_layers(layers: float) -> int:
    """Return an even number of layers, and from 32 on a multiple of 4, so that pipelines divide them."""
    multiple = 2 if layers < 32 else 4
    return max(2, multiple * round(layers / multiple))


def _unlike(layers: int, hidden: int, ffn: int) -> float:
    """Return the distance of the proportions from the usual ones."""
    return abs(math.log(hidden / layers / WIDTH_PER_LAYER)) + abs(math.log(ffn / hidden / FFN_PER_WIDTH))
