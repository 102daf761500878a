"""Attention that drops scores in one operator, on a CPU too: torch has such operators for GPUs only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("shardwise_tests::attend", mutates_args=())
def attend(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Causal means of the rows of x (tokens, hidden) of which a share is left out, and the weights of the
    means."""
    weights = torch.ones(len(x), len(x), dtype=x.dtype).tril()
    weights = F.dropout(weights / weights.sum(1, keepdim=True), dropout_p)
    return weights @ x, weights


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
    (weights,) = ctx.saved_tensors
    return weights.T @ gradient, None


attend.register_autograd(_backward, setup_context=_save)
ATTEND = torch.ops.shardwise_tests.attend.default


class DroppingAttention(nn.Module):
    """A block that draws twice: attention drops scores, and then its output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = attend(x @ self.weight, 0.4)
        return x + F.dropout(mixed, 0.5).tanh()
