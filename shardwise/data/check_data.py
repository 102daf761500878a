"""Find problems of a job's data before anything is tokenized or written.

Sources must exist and be regular files. The tokenizer must be valid, and its ids must be rows of the model's
embedding. The first lines of the first files must contain text, and there must be enough of it for one
sequence. Prepared data are checked by their index. A broken line in the middle of a file is only found when
the data are prepared, because that needs reading everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.config import Data
from shardwise.data.dataset import too_large_ids, too_short
from shardwise.data.ownership import is_prepared
from shardwise.data.prepare import prepared_folder, sources_of
from shardwise.data.shards import Index
from shardwise.data.source_files import find_files, holds_answers, read_pieces
from shardwise.data.tokenizer import BYTES, FILE, load_tokenizer, template_of
from shardwise.errors import ConfigError, UserError

SAMPLED_FILES = 8
"""Number of files of a source whose first text is read."""
_COMPRESSED = (".gz", ".parquet", ".arrow")
"""Endings of files whose size says nothing about the length of their text."""


def problems_of_data(data: Data, vocabulary: int | None, pretrained: str | None = None) -> Iterator[str]:
    """Yield the problems that can be found quickly.

    `vocabulary` is that of the model, if it is known, and `pretrained` is the folder that the model comes
    from.
    """
    yield from unnamed_tokenizer(data, pretrained)
    ids: int | None = None
    try:
        if has_to_be_prepared(data):
            ids = load_tokenizer(data.tokenizer, data.end_of_document).vocabulary
    except UserError as error:
        yield str(error)
    for source in sources_of(data):
        try:
            index = _index(source.path, data)
            if index is None:
                yield from _problems_of_text(source.path, data)
            else:
                ids = index.vocabulary
                if not index.holds_answers:
                    yield from too_short(source.path, index.tokens, data.sequence_length)
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield str(error)
    if vocabulary is not None and ids is not None:
        yield from too_large_ids(ids, vocabulary, pretrained)


def unnamed_tokenizer(data: Data, pretrained: str | None) -> Iterator[str]:
    """Yield a problem if a pretrained model would be trained on bytes because no tokenizer is named.

    The byte tokenizer is the default, and its ids are not those that the model knows.
    """
    # The tokenizer is named by the job, or by the folder if it contains a tokenizer.json.
    named = "tokenizer" in data.model_fields_set
    if pretrained is None or named or all(is_prepared(Path(source.path)) for source in sources_of(data)):
        return
    yield (
        f"model.pretrained: {pretrained} has no {FILE}, so the ids that its model knows are not known here. "
        "Make one with transformers' AutoTokenizer.from_pretrained and save_pretrained, or name "
        "data.tokenizer"
    )


def has_to_be_prepared(data: Data) -> bool:
    """Return whether any source must be tokenized.

    Only then are the tokenizer, which takes a second to read, and the cache needed.
    """
    try:
        return any(_index(source.path, data) is None for source in sources_of(data))
    except UserError:  # the tokenizer may be wrong
        return True


def _index(path: str, data: Data) -> Index | None:
    """Return the index of a source that is prepared, else None."""
    folder = prepared_folder(path, data)
    return Index.read(folder) if is_prepared(folder) else None


def _problems_of_text(path: str, data: Data) -> Iterator[str]:
    """Yield the problems of a source that is not prepared yet."""
    files = find_files(path)
    answers = holds_answers(files, data.text_field)
    template = template_of(data.tokenizer) if answers else None
    for file in files[:SAMPLED_FILES]:
        first = next(read_pieces(file, data.text_field, answers, template), None)
        if first is None and len(files) == 1:
            yield f"{file.path}: no text in it (of 1 file). Give a source that has some."
            return
    if not answers and all(file.path.suffix.lower() not in _COMPRESSED for file in files):
        tokens_per_byte = 1 if data.tokenizer == BYTES else 2  # a normaliser may make text longer
        # Each document also has an end-of-document token.
        most = sum(tokens_per_byte * file.size + 1 for file in files)
        yield from too_short(path, most, data.sequence_length, "at most ")
