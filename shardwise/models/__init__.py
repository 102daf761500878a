"""Plain full-size modules: the transformer, its loss, its first values, sampling from it. No
`torch.distributed`."""

from shardwise.models.attention import attention_backends, describe_attention
from shardwise.models.experts import MixtureOfExperts
from shardwise.models.generate import Remembering, Step, continuation, generate
from shardwise.models.initialise import (
    begins_otherwise,
    check_first_value,
    check_values,
    initial_value,
    initialise,
)
from shardwise.models.loss import IGNORED, VocabularyPart, linear_cross_entropy
from shardwise.models.sharding import Role, Sharding, matches
from shardwise.models.transformer import Block, Head, Transformer
from shardwise.models.unallocated import lost_values, weights_without_memory
from shardwise.models.user_module import adapt, build_own, count_items, counts_items

__all__ = [
    "IGNORED",
    "Block",
    "Head",
    "MixtureOfExperts",
    "Remembering",
    "Role",
    "Sharding",
    "Step",
    "Transformer",
    "VocabularyPart",
    "adapt",
    "attention_backends",
    "begins_otherwise",
    "build_own",
    "check_first_value",
    "check_values",
    "continuation",
    "count_items",
    "counts_items",
    "describe_attention",
    "generate",
    "initial_value",
    "initialise",
    "linear_cross_entropy",
    "lost_values",
    "matches",
    "weights_without_memory",
]
