"""Random text to prove a job on, where the job's own data cannot be used.

A proof compares two computations on the same batches, and their meaning does not matter. What matters is that
many ids occur, that documents end inside sequences, and that some tokens have no loss if the job learns
answers. So random text is used for a job whose data is on another machine, whose tokenizer has more ids than
the shrunk vocabulary, or whose text would take minutes to tokenise. It consists of short documents of about
100,000 characters together, is the same every time, and is read with the byte tokenizer.
"""

from __future__ import annotations

import json
import random
import string
from contextlib import suppress
from pathlib import Path

from shardwise.config import Data
from shardwise.data import Index
from shardwise.data.ownership import is_begun, is_prepared
from shardwise.data.shards import write_atomically
from shardwise.data.source_files import find_files, holds_answers
from shardwise.data.tokenizer import BYTES, tokenizer_fingerprint
from shardwise.errors import UserError

NAME, ANSWERS = "random-text.jsonl", "random-answers.jsonl"
FIELD = "text"
CHARACTERS = 96 << 10
LONGEST_DOCUMENT = 60
QUICK_BYTES = 16 << 20
"""Largest number of bytes of text that is tokenised only for a proof."""
_LETTERS = string.ascii_letters + string.digits + string.punctuation + " \n\tßéжλ中😀"


def can_use_own_data(data: Data, only_bytes: bool) -> bool:
    """Return whether the job's own data can be read here quickly. With `only_bytes`, it must also have no ids
    other than those of the byte tokenizer."""
    try:
        tokenizer_fingerprint(data.tokenizer)
        paths = [source.path for source in data.sources] or [data.source or ""]
        return all(_readable(path, data.tokenizer, only_bytes) for path in paths)
    except UserError:
        return False


def _readable(path: str, tokenizer: str, only_bytes: bool) -> bool:
    if is_prepared(Path(path)):
        return not only_bytes or Index.read(Path(path)).tokenizer == BYTES
    quick = not is_begun(Path(path)) and sum(file.size for file in find_files(path)) <= QUICK_BYTES
    return quick and (tokenizer == BYTES or not only_bytes)


def with_random_text(data: Data, folder: Path) -> Data:
    """Return the same data section with random text as its source. The text is written into the folder unless
    it is already there."""
    answers = _learns_answers(data)
    path = folder / (ANSWERS if answers else NAME)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (_answers() if answers else _text()).encode())
    return data.model_copy(
        update={
            "source": str(path),
            "sources": (),
            "tokenizer": BYTES,
            "end_of_document": None,
            "text_field": FIELD,
        }
    )


def _learns_answers(data: Data) -> bool:
    """Return whether any source of the job holds conversations or answered prompts, as far as this machine
    can tell."""
    for path in [source.path for source in data.sources] or [data.source or ""]:
        with suppress(UserError):
            folder = Path(path)
            if (
                Index.read(folder).holds_answers
                if is_prepared(folder)
                else holds_answers(find_files(path), data.text_field)
            ):
                return True
    return False


def _answers() -> str:
    """Return lines of short prompts, each with a completion."""
    draw, lines, left = random.Random(0), [], CHARACTERS
    while left > 0:
        lengths = (draw.randint(1, longest) for longest in (6, LONGEST_DOCUMENT // 3))
        prompt, completion = ("".join(draw.choices(_LETTERS, k=length)) for length in lengths)
        lines.append(json.dumps({"prompt": prompt, "completion": completion + "."}))
        left -= len(prompt + completion)
    return "\n".join(lines) + "\n"


def _text() -> str:
    draw, lines, left = random.Random(0), [], CHARACTERS
    while left > 0:
        document = "".join(draw.choices(_LETTERS, k=draw.randint(1, LONGEST_DOCUMENT)))
        lines.append(json.dumps({FIELD: document}))
        left -= len(document)
    return "\n".join(lines) + "\n"
