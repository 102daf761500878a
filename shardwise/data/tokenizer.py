"""Text to token ids and back.

Two kinds are enough: raw bytes, which need no file and can represent any text (257 ids: the bytes and one
end-of-document id), and any Hugging Face `tokenizer.json`, run by the `tokenizers` library, whose Rust code
uses every core for a batch.

Every document is closed by one end-of-document id: that of the token that a job names
(`data.end_of_document`), or of the first usual one that the tokenizer has; without either it is refused. A
tokenizer is known by its `fingerprint`, a hash of its file: prepared data remember it, and are never mixed
with ids of another tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat import BYTES_END, ChatTemplate, find_template, template_of_bytes
from shardwise.errors import UserError
from shardwise.files import read_bytes, reading

BYTES = "bytes"
FILE = "tokenizer.json"
_ADVICE = f"Give the path of a Hugging Face {FILE} as data.tokenizer, or {BYTES!r} for the built-in one."
Offsets = NDArray[np.int64]
"""(ids, 2): of each, its first character in the text, and the one after its last."""
END_NAMES = (
    "<|end_of_text|>",  # Llama 3
    "<|endoftext|>",  # GPT-2, Qwen, SmolLM
    "</s>",  # Llama 2, Mistral, T5
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",  # last: where a base end token exists too, this one closes chat turns
)


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def name(self) -> str:
        """`bytes`, or the path it was read from."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""

    @property
    def end(self) -> int:
        """The id that closes a document."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they give equal ids."""

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without any special token added."""

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """The same, and which characters of the text each id stands for. What spells a special token in it
        becomes that one."""

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text for a model to go on from, with what the tokenizer's own rules put before it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; ids that make no valid text become U+FFFD."""

    def find_template(self) -> ChatTemplate | None:
        """How it writes conversations; None: nothing says so."""

    def save(self, folder: Path) -> None:
        """Leave in the folder what `load_tokenizer` needs to read it back."""


class ByteTokenizer:
    """Each byte of the UTF-8 text is its own id; 256 ends a document."""

    name = BYTES
    vocabulary = 257
    end = 256
    fingerprint = "bytes-257"

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """One id per UTF-8 byte."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """One id per UTF-8 byte; the character that stands for the end of a document is that one."""
        return [_bytes_with_offsets(text) for text in texts]

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """Nothing comes before it."""
        return self.encode_batch([text])[0]

    def find_template(self) -> ChatTemplate:
        """Roles and colons."""
        return template_of_bytes()

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes as text; the end-of-document id has none."""
        return bytes(int(identifier) for identifier in ids if int(identifier) < 256).decode(
            "utf-8", errors="replace"
        )

    def save(self, folder: Path) -> None:
        """Nothing to keep: there is only one."""


def _bytes_with_offsets(text: str) -> tuple[NDArray[np.uint32], Offsets]:
    encoded = [
        [ByteTokenizer.end] if character == BYTES_END else list(character.encode("utf-8"))
        for character in text
    ]
    ids = np.asarray([identifier for part in encoded for identifier in part], dtype=np.uint32)
    first = np.repeat(np.arange(len(text)), [len(part) for part in encoded])
    return ids, np.stack((first, first + 1), axis=1)


class HuggingFaceTokenizer:
    """A `tokenizer.json`. Its own truncation, padding and special tokens are turned off: we pack documents
    ourselves."""

    def __init__(self, path: Path, end: str | int | None = None) -> None:
        self.name = str(path)
        self._bytes = _read(path)
        self._tokenizer = _parse(path, self._bytes)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # It adds what begins and ends a text, which only a prompt wants, and may take white space out of the
        # offsets of others.
        self._post_processor, self._tokenizer.post_processor = self._tokenizer.post_processor, None
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.end = end if isinstance(end, int) else _end(path, ids, end)
        self.fingerprint = hash_of(self._bytes)

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Encoded on all cores, without the offsets that training never reads."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """Encoded on all cores."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (
                np.asarray(encoding.ids, dtype=np.uint32),
                np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            )
            for encoding in encodings
        ]

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """With the tokens that begin a text, if the file says that there are such; without one that would end
        it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        encoding = encoding if self._post_processor is None else self._post_processor.process(encoding)
        ids = np.asarray(encoding.ids, dtype=np.uint32)
        return ids[:-1] if len(ids) and ids[-1] == self.end else ids

    def find_template(self) -> ChatTemplate | None:
        """The one beside the file."""
        return find_template(self.name)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included, so that the end of a document shows."""
        return str(self._tokenizer.decode([int(identifier) for identifier in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """A copy of the file, byte for byte."""
        (folder / FILE).write_bytes(self._bytes)


def as_text(tokenizer: Tokenizer, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """The text of ids that come one by one, as soon as its characters are whole: bytes of one may be ids of
    several. `after` are ids before the first, on which it may depend whether that begins with a space."""
    said = [*after]
    shown = len(tokenizer.decode(said))
    for identifier in ids:
        said.append(identifier)
        text = tokenizer.decode(said)
        if len(text) > shown and not text.endswith("\ufffd"):  # what cannot be read yet is shown so
            yield text[shown:]
            shown = len(text)
    if rest := tokenizer.decode(said)[shown:]:
        yield rest


def load_tokenizer(name_or_path: str | Path, end: str | int | None = None) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that holds one; `end` is the token, or its id, that closes a
    document."""
    if str(name_or_path) != BYTES:
        return HuggingFaceTokenizer(_locate(name_or_path), end)
    if isinstance(end, str):
        raise UserError(
            f"data.end_of_document = {end!r}: bytes have an end of their own; leave it out, or give "
            f"data.tokenizer"
        )
    return ByteTokenizer()


def template_of(name_or_path: str | Path) -> ChatTemplate | None:
    """The chat template that belongs to a tokenizer, which need not be read for it."""
    return template_of_bytes() if str(name_or_path) == BYTES else find_template(name_or_path)


def template_fingerprint(name_or_path: str | Path) -> str:
    """Of the chat template that belongs to a tokenizer."""
    template = template_of(name_or_path)
    return "no template" if template is None else template.fingerprint


def tokenizer_fingerprint(name_or_path: str | Path) -> str:
    """The fingerprint alone: reading a large vocabulary takes a second, and data that are prepared do not
    need it."""
    if str(name_or_path) == BYTES:
        return ByteTokenizer.fingerprint
    return hash_of(_read(_locate(name_or_path)))


def _locate(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    with reading(f"data.tokenizer: {path}", _ADVICE):
        return path / FILE if path.is_dir() else path


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, _ADVICE)
    except FileNotFoundError:
        raise UserError(f"data.tokenizer: {path} does not exist. {_ADVICE}") from None


def _parse(path: Path, content: bytes) -> Any:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(content.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    # the library raises bare Exception for a malformed file, and a panic is not even one of those
    except BaseException as error:
        raise UserError(
            f"data.tokenizer: {path} is not a Hugging Face {FILE} ({error}). Give the {FILE} that came with "
            f"the model."
        ) from None


def _end(path: Path, ids: dict[str, int], wanted: str | None) -> int:
    for name in END_NAMES if wanted is None else (wanted,):
        if name in ids:
            return ids[name]
    if wanted is not None:
        raise UserError(
            f"data.end_of_document = {wanted!r}: {path} has no such token. Write one of its tokens, as it "
            f"spells it."
        )
    raise UserError(
        f"data.tokenizer: {path} has no end-of-text token; looked for {', '.join(END_NAMES)}. "
        "Name the one that it has as data.end_of_document."
    )


def hash_of(content: bytes) -> str:
    """The fingerprint of a tokenizer.json of this content."""
    return hashlib.sha256(content).hexdigest()[:32]
