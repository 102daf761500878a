"""Sources, tokenizing, packing, and the global order of samples, with exact resume.

Text is tokenized once into memory-mapped shards (`prepare`), cut into fixed sequences (`dataset`) and visited
in an order that is a pure function of (seed, position) (`order`). The data position of a run is therefore one
number: its step. Only `batches` imports torch, so this package does not import it.
"""

from shardwise.data.dataset import (
    Dataset,
    DatasetSummary,
    Rows,
    check_vocabulary,
    unigram_loss,
    with_data_settings,
)
from shardwise.data.order import Order, permute
from shardwise.data.prepare import prepare, prepare_sources
from shardwise.data.shards import Index
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.data.tokens import Tokens

__all__ = [
    "Dataset",
    "DatasetSummary",
    "Index",
    "Order",
    "Rows",
    "Tokenizer",
    "Tokens",
    "check_vocabulary",
    "load_tokenizer",
    "permute",
    "prepare",
    "prepare_sources",
    "unigram_loss",
    "with_data_settings",
]
