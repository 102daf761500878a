from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from shardwise.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from shardwise.errors import UserError


@given(st.text())
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode_batch([text])
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert tokenizer.decode([*ids.tolist(), tokenizer.end]) == text


def test_bytes_have_257_ids_and_decode_broken_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end) == (257, 256)
    assert tokenizer.decode([0xE4, 0xB8, 65]) == "\ufffdA"


def test_a_tokenizer_file_gives_what_the_library_gives_without_truncation_or_padding(bpe: Path) -> None:
    library = Library.from_file(str(bpe))
    library.no_truncation()
    library.no_padding()
    texts = ["the quick brown fox and a very long tail of other words", "中文 café", ""]
    tokenizer = load_tokenizer(bpe)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.vocabulary == library.get_vocab_size()
    assert tokenizer.end == library.token_to_id("<|endoftext|>")


def test_a_folder_with_a_tokenizer_file_will_do_and_fingerprints_follow_the_content(
    bpe: Path, tmp_path: Path, make_tokenizer: Callable[..., Path]
) -> None:
    other = make_tokenizer(tmp_path / "tokenizer.json", size=310)
    assert (
        load_tokenizer(bpe.parent).fingerprint
        == tokenizer_fingerprint(bpe)
        == load_tokenizer(bpe).fingerprint
    )
    assert len({tokenizer_fingerprint(name) for name in ("bytes", bpe, other)}) == 3


@pytest.mark.parametrize(
    ("specials", "end"),
    [
        (("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"),
        (("<s>", "</s>"), "</s>"),
        (("<|begin_of_text|>", "<|end_of_text|>"), "<|end_of_text|>"),
        (("<pad>", "<eos>"), "<eos>"),
    ],
)
def test_the_usual_end_tokens_are_found(
    specials: tuple[str, ...], end: str, tmp_path: Path, make_tokenizer: Callable[..., Path]
) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json", specials)
    assert load_tokenizer(path).end == Library.from_file(str(path)).token_to_id(end)


def test_mistakes_are_explained(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(
        UserError, match=r"data\.tokenizer: x+ cannot be read: File name too long\. Give the path"
    ):
        load_tokenizer("x" * 300)
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a Hugging Face"):
        load_tokenizer(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bad\.json is not a Hugging Face"):
        load_tokenizer(bad)
    with pytest.raises(UserError, match="has no end-of-text token; looked for"):
        load_tokenizer(make_tokenizer(tmp_path / "endless.json", ("<pad>",)))


def test_the_end_of_documents_can_be_named(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> None:
    path = make_tokenizer(tmp_path / "chat.json", ("<|im_end|>", "<|endoftext|>"))
    library = Library.from_file(str(path))
    assert load_tokenizer(path, "<|im_end|>").end == library.token_to_id("<|im_end|>")
    with pytest.raises(UserError, match=r"data\.end_of_document = '<stop>': .*chat\.json has no such token"):
        load_tokenizer(path, "<stop>")
    with pytest.raises(UserError, match="bytes have an end of their own"):
        load_tokenizer("bytes", "<stop>")


def test_a_tokenizer_without_a_usual_end_can_be_used_by_naming_one(
    tmp_path: Path, make_tokenizer: Callable[..., Path]
) -> None:
    path = make_tokenizer(tmp_path / "odd.json", ("<stop>",))
    assert load_tokenizer(path, "<stop>").end == Library.from_file(str(path)).token_to_id("<stop>")
