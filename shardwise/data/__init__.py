"""Sources, tokenising, packing; the global order of samples; exact resume.

Text is tokenised once into memory-mapped shards (`prepare`), cut into fixed sequences (`dataset`) and visited
in an order that is a pure function of (seed, position) (`order`), so that a run's data position is one
number: its step. Only `batches` needs torch; import it by its own name.
"""

from shardwise.data.dataset import Dataset, DatasetSummary, Rows, check_vocabulary, settled, unigram_loss
from shardwise.data.order import Order, permute
from shardwise.data.prepare import prepare, prepared
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
    "prepared",
    "settled",
    "unigram_loss",
]
