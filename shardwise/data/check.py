"""What can be known of a job's data before anything is tokenised or written: a list of problems.

Sources must be there and be regular files; the tokenizer must be one, and its ids rows of the model's
embedding; the first lines of the first files must hold text, and there must be enough of it for one sequence.
What was prepared before is asked by its index. What only reading all of it can tell (a broken line in the
middle) is found when it is prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shardwise.config import Data
from shardwise.data.dataset import too_large_ids, too_short
from shardwise.data.ownership import is_prepared
from shardwise.data.prepare import located, sources_of
from shardwise.data.shards import Index
from shardwise.data.sources import find_files, holds_answers, read_pieces
from shardwise.data.tokenizer import BYTES, FILE, load_tokenizer, template_of
from shardwise.errors import ConfigError, UserError

GLANCED = 8
"""Files of a source whose first text is looked at."""
_COMPRESSED = (".gz", ".parquet", ".arrow")


def problems_of_data(data: Data, vocabulary: int | None, pretrained: str | None = None) -> Iterator[str]:
    """All that a glance finds; `vocabulary` is the model's, where that is known, and `pretrained` the folder
    it is from."""
    yield from unnamed_tokenizer(data, pretrained)
    ids: int | None = None
    try:
        ids = (
            load_tokenizer(data.tokenizer, data.end_of_document).vocabulary
            if has_to_be_prepared(data)
            else None
        )
    except UserError as error:
        yield str(error)
    for source in sources_of(data):
        try:
            index = _index(source.path, data)
            if index is None:
                yield from _unprepared(source.path, data)
            else:
                ids = index.vocabulary
                yield from (
                    () if index.holds_answers else too_short(source.path, index.tokens, data.sequence_length)
                )
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield str(error)
    if vocabulary is not None and ids is not None:
        yield from too_large_ids(ids, vocabulary, pretrained)


def unnamed_tokenizer(data: Data, pretrained: str | None) -> Iterator[str]:
    """The problem that a model from elsewhere would learn bytes, by default, in place of the ids that it
    knows."""
    named = "tokenizer" in data.model_fields_set  # by the job, or by the folder, if it has a tokenizer.json
    if pretrained is None or named or all(is_prepared(Path(source.path)) for source in sources_of(data)):
        return
    yield (
        f"model.pretrained: {pretrained} has no {FILE}, so the ids that its model knows are not known here. "
        f"Make one with "
        "transformers' AutoTokenizer.from_pretrained and save_pretrained, or name data.tokenizer"
    )


def has_to_be_prepared(data: Data) -> bool:
    """Whether anything is tokenised, so that the tokenizer, which takes a second to read, and the cache are
    needed."""
    try:
        return any(_index(source.path, data) is None for source in sources_of(data))
    except UserError:  # it may be the tokenizer that is wrong
        return True


def _index(path: str, data: Data) -> Index | None:
    folder = located(path, data)
    return Index.read(folder) if is_prepared(folder) else None


def _unprepared(path: str, data: Data) -> Iterator[str]:
    files = find_files(path)
    answers = holds_answers(files, data.text_field)
    template = template_of(data.tokenizer) if answers else None
    for file in files[:GLANCED]:
        if (
            next(islice(read_pieces(file, data.text_field, answers, template), 1), None) is None
            and len(files) == 1
        ):
            yield f"{file.path}: no text in it (of 1 file). Give a source that has some."
            return
    if not answers and all(file.path.suffix.lower() not in _COMPRESSED for file in files):
        a_byte = 1 if data.tokenizer == BYTES else 2  # a normaliser may make text longer
        most = sum(a_byte * file.size + 1 for file in files)  # and a document has an end
        yield from too_short(path, most, data.sequence_length, "at most ")
