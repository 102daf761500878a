from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "to be, or not to be: that is the question",
    "naïve café 中文",
]


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Path]:
    """Trains a small byte-level BPE and writes it as a tokenizer.json."""

    def make(path: Path, specials: tuple[str, ...] = ("<|endoftext|>",), size: int = 300) -> Path:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(WORDS * 5, trainer)
        tokenizer.enable_truncation(4)  # a file in the wild may carry this; we must not obey it
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(path))
        return path

    return make


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., Path]) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
