"""Text to token ids and back.

There are two kinds: raw bytes, which need no file and can represent any text (257 ids: the bytes and one
end-of-document id), and any Hugging Face `tokenizer.json`, run by the `tokenizers` library, whose Rust code
uses all cores for a batch.

Every document ends with one end-of-document id. It is the id of the token that a job names
(`data.end_of_document`), or of the first common one that the tokenizer has; without either, the tokenizer is
refused. The `fingerprint` of a tokenizer is a hash of its file. Prepared data store it, and are never mixed
with the ids of another tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat import BYTES_END, ChatTemplate, find_template, template_of_bytes
from shardwise.errors import UserError
from shardwise.files import read_bytes, reading

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BYTES = "bytes"
"""Name of the byte tokenizer in a job."""
FILE = "tokenizer.json"
"""Name of the file of any other tokenizer."""
_ADVICE = f"Give the path of a Hugging Face {FILE} as data.tokenizer, or {BYTES!r} for the built-in one."
Offsets = NDArray[np.int64]
"""Shape (ids, 2): for each id, its first character in the text and the character after its last."""
END_NAMES = (
    "<|end_of_text|>",  # Llama 3
    "<|endoftext|>",  # GPT-2, Qwen, SmolLM
    "</s>",  # Llama 2, Mistral, T5
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",  # last, because it ends chat turns where the tokenizer has another end token
)
"""Common end-of-document tokens, in the order in which they are looked for."""


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def name(self) -> str:
        """`bytes`, or the path of the file."""

    @property
    def vocabulary(self) -> int:
        """Number of ids: the largest id plus one."""

    @property
    def end(self) -> int:
        """Id of the token that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Text that is equal for two tokenizers only if they produce equal ids."""

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text, without special tokens added."""

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """Return the ids of each text, and which characters each id stands for.

        Text that spells a special token becomes that token.
        """

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text that a model is to continue, with the tokens that the tokenizer puts
        before it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Ids that are not valid text become U+FFFD."""

    def find_template(self) -> ChatTemplate | None:
        """Return the template that writes conversations; None if there is none."""

    def save(self, folder: Path) -> None:
        """Write to the folder what `load_tokenizer` needs to read the tokenizer back."""


class ByteTokenizer:
    """Tokenizer whose ids are the bytes of the UTF-8 text; id 256 ends a document."""

    name = BYTES
    vocabulary = 257
    end = 256
    fingerprint = "bytes-257"

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return one id per UTF-8 byte."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """Return one id per UTF-8 byte. The character `BYTES_END` becomes the end-of-document id."""
        return [_bytes_with_offsets(text) for text in texts]

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """Return one id per UTF-8 byte; no token comes before the text."""
        return self.encode_batch([text])[0]

    def find_template(self) -> ChatTemplate:
        """Return a template that writes each role, a colon and the content."""
        return template_of_bytes()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes as text. The end-of-document id has no text."""
        content = bytes(int(identifier) for identifier in ids if int(identifier) < 256)
        return content.decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write nothing, because the byte tokenizer needs no file."""


def _bytes_with_offsets(text: str) -> tuple[NDArray[np.uint32], Offsets]:
    encoded = [
        [ByteTokenizer.end] if character == BYTES_END else list(character.encode("utf-8"))
        for character in text
    ]
    ids = np.asarray([identifier for part in encoded for identifier in part], dtype=np.uint32)
    first = np.repeat(np.arange(len(text)), [len(part) for part in encoded])
    return ids, np.stack((first, first + 1), axis=1)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, without its truncation, padding and special tokens: shardwise packs documents
    itself.
    """

    def __init__(self, path: Path, end: str | int | None = None) -> None:
        self.name = str(path)
        self._bytes = _read(path)
        self._tokenizer = _parse(path, self._bytes)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The post-processor adds the tokens that begin and end a text, which only prompts need. It may also
        # remove white space from the offsets of other tokens.
        self._post_processor, self._tokenizer.post_processor = self._tokenizer.post_processor, None
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.end = end if isinstance(end, int) else _end_id(path, ids, end)
        self.fingerprint = file_fingerprint(self._bytes)

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text, encoded on all cores. Training does not need the offsets."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.uint32], Offsets]]:
        """Return the ids of each text and their offsets, encoded on all cores."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (
                np.asarray(encoding.ids, dtype=np.uint32),
                np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            )
            for encoding in encodings
        ]

    def encode_prompt(self, text: str) -> NDArray[np.uint32]:
        """Return the ids with the tokens that begin a text, if the file defines any, and without one that
        ends it.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        encoding = encoding if self._post_processor is None else self._post_processor.process(encoding)
        ids = np.asarray(encoding.ids, dtype=np.uint32)
        return ids[:-1] if len(ids) and ids[-1] == self.end else ids

    def find_template(self) -> ChatTemplate | None:
        """Return the template beside the tokenizer's file."""
        return find_template(self.name)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with special tokens, so that the end of a document is visible."""
        return str(self._tokenizer.decode([int(identifier) for identifier in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write an exact copy of the file."""
        (folder / FILE).write_bytes(self._bytes)


def as_text(tokenizer: Tokenizer, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of ids that come one by one, as soon as its characters are complete.

    Several ids may encode the bytes of one character. `after` are the ids before the first one; whether the
    text begins with a space may depend on them.
    """
    received = [*after]
    length = len(tokenizer.decode(received))
    for identifier in ids:
        received.append(identifier)
        text = tokenizer.decode(received)
        if len(text) > length and not text.endswith("\ufffd"):  # U+FFFD stands for an incomplete character
            yield text[length:]
            length = len(text)
    if rest := tokenizer.decode(received)[length:]:
        yield rest


def load_tokenizer(name_or_path: str | Path, end: str | int | None = None) -> Tokenizer:
    """Return the tokenizer `bytes`, or that of a tokenizer.json or of a folder that contains one.

    `end` is the token that ends a document, or its id.
    """
    if str(name_or_path) != BYTES:
        return HuggingFaceTokenizer(_locate(name_or_path), end)
    if isinstance(end, str):
        problem = f"data.end_of_document = {end!r}: bytes have an end of their own"
        raise UserError(f"{problem}; leave it out, or give data.tokenizer")
    return ByteTokenizer()


def template_of(name_or_path: str | Path) -> ChatTemplate | None:
    """Return the chat template that belongs to a tokenizer, without reading the tokenizer."""
    return template_of_bytes() if str(name_or_path) == BYTES else find_template(name_or_path)


def template_fingerprint(name_or_path: str | Path) -> str:
    """Return the fingerprint of the chat template that belongs to a tokenizer."""
    template = template_of(name_or_path)
    return "no template" if template is None else template.fingerprint


def tokenizer_fingerprint(name_or_path: str | Path) -> str:
    """Return the fingerprint only.

    Reading a large vocabulary takes a second, and prepared data do not need it.
    """
    if str(name_or_path) == BYTES:
        return ByteTokenizer.fingerprint
    return file_fingerprint(_read(_locate(name_or_path)))


def _locate(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    with reading(f"data.tokenizer: {path}", _ADVICE):
        return path / FILE if path.is_dir() else path


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, _ADVICE)
    except FileNotFoundError:
        raise UserError(f"data.tokenizer: {path} does not exist. {_ADVICE}") from None


def _parse(path: Path, content: bytes) -> Library:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises a bare Exception for a malformed file, and a panic in Rust is a BaseException.
    except BaseException as error:
        problem = f"data.tokenizer: {path} is not a Hugging Face {FILE} ({error})"
        raise UserError(f"{problem}. Give the {FILE} that came with the model.") from None


def _end_id(path: Path, ids: dict[str, int], wanted: str | None) -> int:
    """Return the id of the end-of-document token that is wanted, or of the first common one."""
    for name in END_NAMES if wanted is None else (wanted,):
        if name in ids:
            return ids[name]
    if wanted is not None:
        problem = f"data.end_of_document = {wanted!r}: {path} has no such token"
        raise UserError(f"{problem}. Write one of its tokens, as it spells it.")
    raise UserError(
        f"data.tokenizer: {path} has no end-of-text token; looked for {', '.join(END_NAMES)}. "
        "Name the one that it has as data.end_of_document."
    )


def file_fingerprint(content: bytes) -> str:
    """Return the fingerprint of a tokenizer.json with this content."""
    return hashlib.sha256(content).hexdigest()[:32]
