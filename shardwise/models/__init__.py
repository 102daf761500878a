"""Plain full-size modules: the transformer, its loss, its first values, sampling from it. No `torch.distributed`."""

from shardwise.models.attention import attention_backends, describe_attention
from shardwise.models.generate import generate
from shardwise.models.initialise import check_values, initial_value, initialise
from shardwise.models.loss import IGNORED, linear_cross_entropy
from shardwise.models.transformer import Block, Transformer

__all__ = [
    "IGNORED",
    "Block",
    "Transformer",
    "attention_backends",
    "check_values",
    "describe_attention",
    "generate",
    "initial_value",
    "initialise",
    "linear_cross_entropy",
]
