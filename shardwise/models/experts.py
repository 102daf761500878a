"""A mixture of experts: many feed-forward layers, of which each token uses a few (Shazeer et al. 2017).

    scores  = softmax or sigmoid of the router's logits          (tokens, experts)
    chosen  = the experts_per_token best, of scores + bias
    y       = sum over the chosen of weight · expert(x)  (+ shared(x))

Parameters grow with the number of experts, arithmetic only with the number of experts that a token uses. No
token is ever dropped: the rows are sorted by expert and each expert takes all rows that chose it, by one
grouped matmul on a GPU in bfloat16, else by a loop over the experts (Gale et al. 2022, MegaBlocks). Beside
the experts' arithmetic that costs a copy of tokens × experts_per_token rows and a sum over them, and the same
in backward. Sorting and unsorting are gathers by a permutation in both directions (models/sorting.py), so no
sum depends on the order in which threads arrive. In float8 (models/float8_grouped.py) tokens are cast before
they are copied, and the copies have 8 bits.

The router computes in float32 or better whatever the dtype of the activations, with weights that no layout
rounds (parallel/data.py): a rounded score would send tokens to other experts.

Without a remedy, a router learns to prefer few experts. There are three remedies, which can be combined:

- `balance_loss` (Switch, Fedus et al. 2021; per sequence as in DeepSeek-V3, 2024): experts · Σ f_i P_i, where
  f_i is the share of a sequence's choices that fell on expert i and P_i its mean normalised score. It is 1
  when even. Because it is taken per sequence, it does not depend on how sequences are dealt out to
  micro-batches and devices.
- `balance_bias` (Wang et al. 2024): a bias is added to the score for the choice of experts, but not for their
  weights; after each step it moves by a fixed amount towards experts with less than the mean load. It has no
  gradient, so it does not change what the model learns.
- `router_z_loss` (ST-MoE, Zoph et al. 2022): Σ logsumexp(logits)², which keeps the logits small, where
  rounding errors are small.

Both losses are sums over tokens, as the cross-entropy is. They are attached to the output instead of
returned: the output passes through a node whose forward does nothing and whose backward starts the gradient
of the loss. So a pipeline stage without the head still trains its routers, and no code between here and the
head has to pass a loss on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import AutogradContext, inside_backward
from shardwise.config.model import Model
from shardwise.models.float8_grouped import GroupedProducts
from shardwise.models.layers import GatedFeedForward
from shardwise.models.products import linear
from shardwise.models.sorting import Sorting, copy_rows, sort_evenly, weighted_sum
from shardwise.models.torch_dtypes import wide
from shardwise.models.unallocated import ExactBuffers

ALIGNMENT_BYTES = 16
"""Alignment of rows in bytes that the grouped matmul needs."""


class Routing(NamedTuple):
    """The experts of each token. Logits and shares are float32 or better."""

    experts: Tensor
    """Chosen experts, the best first: (tokens, experts_per_token)."""
    weights: Tensor
    """Factors for the outputs of the chosen experts: (tokens, experts_per_token)."""
    logits: Tensor
    """Outputs of the router's linear layer: (tokens, experts)."""
    shares: Tensor
    """Scores that sum to 1 over the experts: (tokens, experts)."""


class Router(ExactBuffers):
    """Scores every expert for every token and chooses the best. Its bias stays in float32 whatever the model
    is cast to."""

    bias: Tensor | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.weight = _weight(config.experts, config.hidden)
        # Part of the state, but never of the optimizer: see MixtureOfExperts.update_bias.
        self.register_buffer(
            "bias", torch.zeros(config.experts, dtype=torch.float32) if config.balance_bias else None
        )

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of rows (tokens, hidden)."""
        config, dtype = self.config, wide(x.dtype)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        biased = scores.detach() if self.bias is None else scores.detach() + self.bias
        experts = biased.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.normalise_routing:
            weights = weights / _positive_sum(weights)
        shares = scores if config.router == "softmax" else scores / _positive_sum(scores)
        return Routing(experts, (weights * config.routing_scale).to(x.dtype), logits, shares)


def _positive_sum(scores: Tensor) -> Tensor:
    """Return the sum over the last dim, never exactly zero: all sigmoids may be zero."""
    return scores.sum(-1, keepdim=True) + 1e-20


class Experts(nn.Module):
    """SwiGLU layers, stacked in the first dim of three weights. A device may hold only some of the layers;
    the weights tell how many."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate = _weight(config.experts, config.expert_width, config.hidden)
        self.up = _weight(config.experts, config.expert_width, config.hidden)
        self.down = _weight(config.experts, config.hidden, config.expert_width)
        self.float8: GroupedProducts | None = None
        """Products that are made in 8 bits; None: none of them."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return for each token (tokens, hidden) the sum of its experts' outputs, times their weights.

        `chosen` and `weights` are the experts of each token and their weights (tokens, experts_per_token);
        counts[i] tokens have chosen expert i.
        """
        sorting = sort_evenly(chosen)
        return weighted_sum(self.outputs(tokens, counts, sorting), weights.flatten(), sorting)

    def outputs(self, rows: Tensor, counts: Tensor, sorting: Sorting | None = None) -> Tensor:
        """Return the experts' outputs of rows (n, hidden), sorted by expert.

        The rows are sorted already, or copied and sorted by `sorting`; expert i takes counts[i] of them.
        """
        gate_up, down = (None, None) if self.float8 is None else (self.float8.gate_up, self.float8.down)
        if gate_up is None and sorting is not None:
            rows = copy_rows(rows, sorting)
        if gate_up is None and down is None:
            return apply_experts(rows, counts, self.gate, self.up, self.down)
        ends = counts.cumsum(0, dtype=torch.int32)
        if gate_up is not None:
            gate, up = gate_up(rows, ends, (self.gate, self.up), sorting).chunk(2, dim=1)
        else:
            gate, up = _product(rows, counts, self.gate), _product(rows, counts, self.up)
        inner = F.silu(gate) * up
        if down is None:
            return _product(inner, counts, self.down)
        result: Tensor = down(inner, ends, (self.down,))
        return result


def apply_experts(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)) with the weights of each row's expert. An expert without rows gets a
    gradient of zeros."""
    return _product(F.silu(_product(rows, counts, gate)) * _product(rows, counts, up), counts, down)


def _product(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its expert."""
    weight = weight.to(rows.dtype)
    if _can_group(rows, weight):
        return F.grouped_mm(rows, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    product: Tensor = _product_per_expert(rows, counts, weight)
    return product


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _product_per_expert(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Multiply expert by expert. The counts differ each time, for which the compiler would compile again."""
    # unbind instead of an index per expert: the backward of an index is as large as all experts together.
    return torch.cat(list(map(linear, rows.split_with_sizes(counts.tolist()), weight.unbind())))


def _can_group(rows: Tensor, weight: Tensor) -> bool:
    supported = rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0
    return supported and weight.shape[-1] * weight.element_size() % ALIGNMENT_BYTES == 0


class MixtureOfExperts(ExactBuffers):
    """The feed-forward layer of a block, as a router and its experts."""

    load: Tensor

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.shared_experts * config.expert_width
        self.shared = GatedFeedForward(config, width) if width else None
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)
        self.gradient_scale: Tensor | float = 1.0
        """Factor of the summed cross-entropy in backward; the balancing losses, sums over tokens too, get the
        same."""
        self.sum_sequence: Callable[[Tensor], Tensor] = _identity
        """Function that sums a (rows, experts) tensor over all devices that hold parts of these sequences;
        its gradient is the identity."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output: (batch, sequence, hidden), as the input."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        counts = self._count(routing.experts, sequences=x.shape[0])
        mixed: Tensor = self.experts(tokens, routing.experts, routing.weights, counts.sum(0))
        result = mixed.view(x.shape)
        if self.shared is not None:
            result = result + self.shared(x)
        if torch.is_grad_enabled():
            result = self._balance(result, routing, counts)
        return result

    def take_load(self) -> Tensor:
        """Return how often each expert was chosen in training since the last call, and count from zero
        again."""
        load, self.load = self.load, torch.zeros_like(self.load)
        return load

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """After a step, raise the bias of experts below the mean load and lower that of the others. `load` is
        that of the whole global batch."""
        assert self.router.bias is not None, "balance_bias is 0"
        # In integers, so that the sign is exact on every layout.
        self.router.bias += self.config.balance_bias * (load.sum() - load * load.numel()).sign()

    def _count(self, experts: Tensor, sequences: int) -> Tensor:
        """Return how often each sequence chose each expert: (batch, experts)."""
        chosen = experts.view(sequences, -1)
        counts = chosen.new_zeros(sequences, self.config.experts)
        return counts.scatter_add_(1, chosen, torch.ones_like(chosen))

    def _balance(self, result: Tensor, routing: Routing, counts: Tensor) -> Tensor:
        """Count the load and attach the losses."""
        self._add_load(counts)
        if self.config.balance_loss:
            loss = balance_loss(routing.shares, counts, self.sum_sequence)
            result = attach(result, self.config.balance_loss * loss, self.gradient_scale)
        if self.config.router_z_loss:
            loss = routing.logits.logsumexp(-1).square().sum()
            result = attach(result, self.config.router_z_loss * loss, self.gradient_scale)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _add_load(self, counts: Tensor) -> None:
        """Count each micro-batch once: not again when backward recomputes activations."""
        if not inside_backward():
            self.load.add_(counts.sum(0))


def balance_loss(shares: Tensor, counts: Tensor, sum_sequence: Callable[[Tensor], Tensor]) -> Tensor:
    """Return tokens · experts · Σ f_i P_i, summed over sequences, from shares (tokens, experts) and counts
    (sequences, experts)."""
    sequences, experts = counts.shape
    local_shares = shares.view(sequences, -1, experts).sum(1)
    # Sum both over whole sequences, in one exchange.
    whole_counts, whole_shares = sum_sequence(torch.cat((counts.to(shares.dtype), local_shares))).chunk(2)
    f = whole_counts / whole_counts.sum(-1, keepdim=True)
    return experts * (f * whole_shares).sum()  # shares summed over a sequence are tokens · P


def attach(x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
    """Return x unchanged; when a gradient comes back to it, `loss` gets the gradient `scale`."""
    scale = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
    attached: Tensor = _Attach.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Forward returns x. Backward passes the gradient on to x, and gives `scale` to the loss."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale, None


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(shape), std=0.02))


def _identity(tensor: Tensor) -> Tensor:
    return tensor
