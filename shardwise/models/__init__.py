"""The transformer as a plain module of full size, its loss, its initial values, and sampling from it.

Nothing here uses `torch.distributed`.
"""

from shardwise.models.attention import attention_backends, describe_attention
from shardwise.models.experts import MixtureOfExperts
from shardwise.models.generate import CachedLogits, NextLogits, continuation, generate
from shardwise.models.initialise import (
    check_first_value,
    check_values,
    has_initial_value,
    initial_value,
    initialise,
)
from shardwise.models.loss import IGNORED, VocabularyPart, linear_cross_entropy
from shardwise.models.program_module import (
    LossCall,
    LossSums,
    OfProgram,
    StageCall,
    build_program_module,
    for_program,
    use_factory,
)
from shardwise.models.sharding import Role, Sharding, matches
from shardwise.models.transformer import Block, Head, Transformer
from shardwise.models.unallocated import weights_without_memory
from shardwise.models.user_module import (
    adapt,
    build_user_module,
    count_items,
    counts_items,
    with_embeddings_in,
)

__all__ = [
    "IGNORED",
    "Block",
    "CachedLogits",
    "Head",
    "LossCall",
    "LossSums",
    "MixtureOfExperts",
    "NextLogits",
    "OfProgram",
    "Role",
    "Sharding",
    "StageCall",
    "Transformer",
    "VocabularyPart",
    "adapt",
    "attention_backends",
    "build_program_module",
    "build_user_module",
    "check_first_value",
    "check_values",
    "continuation",
    "count_items",
    "counts_items",
    "describe_attention",
    "for_program",
    "generate",
    "has_initial_value",
    "initial_value",
    "initialise",
    "linear_cross_entropy",
    "matches",
    "use_factory",
    "weights_without_memory",
    "with_embeddings_in",
]
