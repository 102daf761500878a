"""Generate shards of random tokens, as data of any vocabulary and length."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwise.data.shards import Index, ShardWriter, token_dtype


def write(folder: Path, tokens: int, vocabulary: int, seed: int = 0) -> Path:
    """A prepared folder of that many uniformly random tokens in one document."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(vocabulary)
    writer = ShardWriter(folder, 0, dtype)
    writer.append(np.random.default_rng(seed).integers(0, vocabulary, tokens), ends_document=True)
    Index("random", "bytes", "random", vocabulary, vocabulary - 1, dtype, (writer.finish(),)).write(folder)
    return folder
