"""Floating-point operations of a training step, by one named convention.

A model FLOP utilisation (MFU) means nothing until one says what was counted. Here, for every token of a
sequence of length s:

- each weight of a matrix that is multiplied costs 2 in the forward and 4 in the backward pass: 6 a weight.
  The output head is such a matrix (also when tied to the embedding); looking up an embedding, a norm or a
  bias is not;
- of the experts of a mixture only those count that a token visits, with the router, which every token
  visits;
- attention multiplies queries by keys and scores by values: 4 · heads · head_dim · s a layer forward, twice
  that backward, 12 in all, and half of it because a causal token sees on average half of the sequence; with a
  window of w tokens it sees w (1 - w / 2s) of them on average;
- recomputed activations never count: work done twice is not utilisation.

This is the count of the PaLM paper (Chowdhery et al. 2022, appendix B) with the head counted and the causal
half taken. Reports that leave the half out show a higher MFU for the same speed: 18 % higher for `llama3-1b`
at 8192 tokens.
"""

from __future__ import annotations

from math import prod

from shardwise.config import Model
from shardwise.config.parameters import ModuleParameters, parameter_shapes

FLOP_CONVENTION = "6 per matmul weight (head yes, embedding no) + causal half of attention, no recompute"
MODULE_FLOP_CONVENTION = (
    "6 per parameter (2 if frozen), for a module of your own: attention not counted, embeddings counted"
)


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward for one token, by `FLOP_CONVENTION`."""
    windows = [model.visible_tokens(layer, sequence_length) for layer in range(model.layers)]
    # The number of tokens that a token attends to on average, summed over layers.
    seen = sum(window * (1 - window / (2 * sequence_length)) for window in windows)
    return 6.0 * matmul_weights(model) + 12 * model.heads * model.head_dim * seen


def module_flops_per_token(parameters: ModuleParameters) -> float:
    """Return the FLOPs per token of a user's module, by `MODULE_FLOP_CONVENTION`.

    Only the forward of a frozen weight counts: it has no gradient, and most often no layer before it needs
    one.
    """
    return 6.0 * parameters.trained + 2.0 * parameters.frozen


def matmul_weights(model: Model) -> int:
    """Return the number of weights that a token is multiplied by: all matrices of the blocks, the experts
    that it visits, and the head."""
    shapes = [shape for name, shape in parameter_shapes(model).items() if name.startswith("blocks.")]
    matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
    visited = sum(model.experts_per_token * prod(shape[1:]) for shape in shapes if len(shape) == 3)
    return matrices + visited + model.vocabulary * model.hidden
