"""Conversations: written as transformers does it, learnt where the assistant speaks, packed whole, refused by
their line."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, processors

from shardwise.config import Data
from shardwise.data import render
from shardwise.data.chat import find_template
from shardwise.data.dataset import IGNORED, Dataset
from shardwise.data.prepare import prepare
from shardwise.data.shards import Index
from shardwise.data.tokenizer import load_tokenizer
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + "
    "'\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
"""
FORGETFUL = """
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('no ' + message.role + ' here') }}
    {%- endif %}
    {%- set said = message.content.split('</think>')[-1] if not loop.last else message.content %}
    {{- '<|im_start|>' + message.role + '\n' + said + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
PARTS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' }}{{ '\n' if not loop.last }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
CALLS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is defined and message.content is not none %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def said(*contents: str, first: str = "user") -> dict[str, Any]:
    roles = ["user", "assistant"] if first == "user" else ["system", "user", "assistant"]
    return {
        "messages": [
            {"role": roles[n % len(roles)], "content": content} for n, content in enumerate(contents)
        ]
    }


TALKS = [
    said("to be?", "or not to be"),
    said("naïve café 中文?", "the quick\nbrown  fox \n", "to be", "that is the question: 中文😀"),
    said("be brief", "the lazy dog?", "jumps", first="system"),
]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., Path]
) -> Callable[[str], Path]:
    """A folder as of a model: a tokenizer and the template."""
    made: dict[str, Path] = {}

    def with_template(template: str) -> Path:
        if template not in made:
            path = made[template] = tmp_path_factory.mktemp("model")
            make_tokenizer(path / "tokenizer.json", SPECIALS)
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": template,
            }
            (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return made[template]

    return with_template


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def documents(prepared: Path) -> list[tuple[list[int], list[bool]]]:
    """Ids of each document, and whether each is to be learnt."""
    tokens = Tokens.open(prepared)
    ids, learnt = tokens.read(0, len(tokens)), tokens.learnt(0, len(tokens))
    cuts = tokens.ends[:-1]
    return [
        (a.tolist(), b.tolist()) for a, b in zip(np.split(ids, cuts), np.split(learnt, cuts), strict=True)
    ]


def spoken(path: Path, document: tuple[list[int], list[bool]]) -> list[str]:
    """The stretches of a document that are learnt, as text."""
    parts: list[list[int]] = [[]]
    for token, learnt in zip(*document, strict=True):
        parts = [*parts[:-1], [*parts[-1], token]] if learnt else [*parts, []]
    return [load_tokenizer(path).decode(part) for part in parts if part]


def theirs(path: Path, messages: Any, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, truncation=False, padding=False, **more
    )


def test_ids_are_those_of_transformers_and_answers_are_learnt_with_their_end(
    folder: Any, tmp_path: Path
) -> None:
    path = folder(CHATML)
    index = prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "out")
    assert index.holds_answers
    found = documents(tmp_path / "out")
    assert [ids for ids, _ in found] == [theirs(path, talk["messages"])["input_ids"] for talk in TALKS]
    answers = [
        [m["content"] + "<|im_end|>" for m in talk["messages"] if m["role"] == "assistant"] for talk in TALKS
    ]
    assert [spoken(path, document) for document in found] == answers


def test_white_space_in_an_answer_is_learnt_whatever_a_tokenizer_says_of_offsets(
    folder: Any, tmp_path: Path
) -> None:
    """Some tokenizers leave white space out of the characters that a token stands for: nothing of an
    indentation is left."""
    trimming = tmp_path / "trimming"
    trimming.mkdir()
    for file in folder(CHATML).iterdir():
        (trimming / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(trimming / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(trimming / "tokenizer.json"))
    answer = "\n\n    to be:\n        or  not\n"
    prepare(jsonl(tmp_path / "talks.jsonl", [said("the fox?", answer)]), trimming, tmp_path / "out")
    (document,) = documents(tmp_path / "out")
    assert spoken(trimming, document) == [answer + "<|im_end|>"]


def test_answers_that_a_template_marks_are_those_that_transformers_masks(folder: Any, tmp_path: Path) -> None:
    path = folder(MARKED)
    prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "out")
    for talk, (ids, learnt) in zip(TALKS, documents(tmp_path / "out"), strict=True):
        expected = theirs(path, talk["messages"], return_assistant_tokens_mask=True)
        assert ids == expected["input_ids"]
        assert learnt == [bool(mark) for mark in expected["assistant_masks"]]


def test_a_template_that_forgets_thoughts_gives_a_text_for_each_answer(folder: Any, tmp_path: Path) -> None:
    path = folder(FORGETFUL)
    talk = said("to be?", "<think>not</think>or", "the fox?", "<think>quick</think>jumps")
    prepare(jsonl(tmp_path / "talks.jsonl", [talk]), path, tmp_path / "out")
    first, second = documents(tmp_path / "out")
    assert first[0] == theirs(path, talk["messages"][:2])["input_ids"]
    assert second[0] == theirs(path, talk["messages"])["input_ids"]
    assert spoken(path, first) == ["<think>not</think>or<|im_end|>"]
    assert spoken(path, second) == ["<think>quick</think>jumps<|im_end|>"]


def test_a_prompt_is_read_and_its_completion_is_learnt_with_the_end(bpe: Path, tmp_path: Path) -> None:
    prepare(
        jsonl(tmp_path / "x.jsonl", [{"prompt": "to be, or", "completion": " not to be"}]),
        bpe,
        tmp_path / "out",
    )
    (document,) = documents(tmp_path / "out")
    assert load_tokenizer(bpe).decode(document[0]) == "to be, or not to be<|endoftext|>"
    assert spoken(bpe, document) == [" not to be<|endoftext|>"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_hold_conversations_too(folder: Any, tmp_path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    named = [{"messages": [{**message, "name": None} for message in talk["messages"]]} for talk in TALKS]
    table, file = arrow.Table.from_pylist(named), tmp_path / f"talks.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with arrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    path = folder(CHATML)
    prepare(file, path, tmp_path / "table")
    prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "lines")
    assert documents(tmp_path / "table") == documents(tmp_path / "lines")


def test_prepared_in_small_shards_or_begun_again_it_is_the_same(folder: Any, tmp_path: Path) -> None:
    path, source = folder(CHATML), jsonl(tmp_path / "talks.jsonl", TALKS * 5)
    prepare(source, path, tmp_path / "one")
    prepare(source, path, tmp_path / "many", shard_tokens=40)
    assert len(Index.read(tmp_path / "many").shards) > 3
    assert documents(tmp_path / "many") == documents(tmp_path / "one")


def test_another_template_is_other_work_and_text_is_prepared_as_ever(folder: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "talks.jsonl", TALKS)
    first = prepare(source, folder(CHATML), tmp_path / "out").source
    assert prepare(source, folder(CHATML), tmp_path / "out").source == first
    assert prepare(source, folder(MARKED), tmp_path / "out").source != first
    text = jsonl(tmp_path / "text.jsonl", [{"text": "to be", "messages": "not read"}])
    index = prepare(text, folder(CHATML), tmp_path / "text")
    assert not index.holds_answers
    assert not list((tmp_path / "text").glob("*.answers"))


def test_sequences_hold_whole_conversations_that_end_is_filled_up_and_answers_alone_count(
    folder: Any, tmp_path: Path
) -> None:
    path, length = folder(CHATML), 90
    source = jsonl(tmp_path / "talks.jsonl", [*TALKS * 3, said("to be " * 40, "cut")])
    data = Data(
        source=str(source),
        tokenizer=str(path),
        cache=str(tmp_path / "cache"),
        sequence_length=length,
        held_out=0.0,
    )
    dataset = Dataset.open(data, 0)
    assert dataset.reset_attention
    assert dataset.describe().cut == 1
    (stream,) = dataset.streams
    found, rows, seen = documents(stream.tokens.folder), dataset.sequences(0, stream.training), []
    assert rows.documents is not None
    for inputs, targets, begins in zip(rows.inputs, rows.targets, rows.documents, strict=True):
        for begin in np.unique(begins).tolist():
            ids, goals = inputs[begins == begin].tolist(), targets[begins == begin].tolist()
            if set(ids) == {stream.tokens.index.end}:  # what is left of the sequence
                assert set(goals) == {IGNORED}
                continue
            whole, learnt = next(document for document in found if document[0][: len(ids)] == ids)
            assert len(ids) == len(whole) or begin + len(ids) == length
            nexts = zip(whole[1:], learnt[1:], strict=True)
            expected = [token if counts else IGNORED for token, counts in nexts][: len(ids)]
            assert goals == [*expected, *[IGNORED] * (len(ids) - len(expected))]
            seen.append(whole)
    assert sorted(seen) == sorted(ids for ids, _ in found)


def test_a_sequence_too_short_for_any_answer_is_refused_with_one_that_does(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "x.jsonl",
        [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a" * 30, "completion": "b"}],
    )
    data = Data(source=str(source), cache=str(tmp_path / "cache"), sequence_length=10)
    with pytest.raises(UserError, match=r"sequence_length = 10.* at least 21; 31 reaches an answer of each"):
        Dataset.open(data, 0)


BAD = [
    ({"messages": []}, "not a list of messages"),
    ({"messages": "hello"}, "not a list of messages"),
    ({"messages": ["hello"]}, "message 1 is 'hello', not an object"),
    ({"messages": [{"content": "x"}]}, "message 1 .* not an object with `role`"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "the content of message 1, part 1, `text` is null, not text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "message 1, part 1, is of type 'image'; only text is learnt from",
    ),
    (
        {"messages": [{"role": "user", "content": ["x"]}]},
        "message 1, part 1, is 'x'; only text is learnt from",
    ),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "the content of message 1 is dict, not text"),
    ({"messages": [{"role": "user", "content": None}]}, "the content of message 1 is null, not text"),
    (
        {"messages": [*said("x")["messages"], {"role": "assistant", "content": None}]},
        "message 2 is null, not text",
    ),
    (said("x", []), "message 2 is an empty answer"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no message has the role `assistant`"),
    (said("x", " "), "message 2 is an empty answer"),
    (said("x", "y", "z", first="system"), "the chat template refuses it: no system here"),
    ({"prompt": "x", "completion": ""}, "an empty `completion`"),
    ({"prompt": 3, "completion": "x"}, "`prompt` is int, not text"),
    ({"text": "x"}, "a text among conversations"),
    ({"other": "x"}, "no field 'text'; there are: other"),
]


@pytest.mark.parametrize(("record", "words"), BAD)
def test_a_bad_record_is_refused_by_file_and_line(
    folder: Any, tmp_path: Path, record: Any, words: str
) -> None:
    source = jsonl(tmp_path / "talks.jsonl", [TALKS[0], record])
    with pytest.raises(UserError, match=f"talks.jsonl, line 2: .*{words}"):
        prepare(source, folder(FORGETFUL), tmp_path / "out")


def in_parts(talk: dict[str, Any]) -> dict[str, Any]:
    """The same conversation, every content in two parts of text."""
    halves = [(message, len(message["content"]) // 2) for message in talk["messages"]]
    return {
        "messages": [
            {
                **message,
                "content": [
                    {"type": "text", "text": message["content"][part]}
                    for part in (slice(cut), slice(cut, None))
                ],
            }
            for message, cut in halves
        ]
    }


def test_parts_of_text_reach_a_template_that_takes_them_as_in_transformers(
    folder: Any, tmp_path: Path
) -> None:
    path, talks = folder(PARTS), [in_parts(talk) for talk in TALKS]
    prepare(jsonl(tmp_path / "talks.jsonl", talks), path, tmp_path / "out")
    found = documents(tmp_path / "out")
    assert [ids for ids, _ in found] == [theirs(path, talk["messages"])["input_ids"] for talk in talks]
    assert spoken(path, found[0]) == ["or not\n to be<|im_end|>"], (
        "the template's own way to put parts together"
    )


@pytest.mark.parametrize(
    "template",
    [CHATML, MARKED, FORGETFUL.replace("'user', ", "'user', 'system', ")],
    ids=["plain", "marked", "forgetful"],
)
def test_parts_of_text_are_joined_for_a_template_of_strings(
    folder: Any, tmp_path: Path, template: str
) -> None:
    path = folder(template)
    prepare(jsonl(tmp_path / "parts.jsonl", [in_parts(talk) for talk in TALKS]), path, tmp_path / "parts")
    prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "text")
    assert documents(tmp_path / "parts") == documents(tmp_path / "text")


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"title": "Emma"}}}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "absent"])
def test_tool_calls_without_content_are_written_as_in_transformers_and_learnt(
    folder: Any, tmp_path: Path, content: dict[str, Any]
) -> None:
    calling = {"role": "assistant", **content, "tool_calls": [CALL]}
    messages = [
        *said("Emma?")["messages"],
        calling,
        {"role": "tool", "content": "one left"},
        *said("", "Yes.")["messages"][1:],
    ]
    path = folder(CALLS)
    prepare(jsonl(tmp_path / "talks.jsonl", [{"messages": messages}]), path, tmp_path / "out")
    (document,) = documents(tmp_path / "out")
    assert document[0] == theirs(path, messages)["input_ids"]
    assert spoken(path, document) == [json.dumps(CALL["function"]) + "<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize(
    "template", [CHATML.replace("message.content +", "message.content ~"), "bytes"], ids=["chatml", "bytes"]
)
def test_tool_calls_that_a_template_does_not_write_are_refused(
    folder: Any, tmp_path: Path, template: str
) -> None:
    messages = [*said("Emma?")["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    source = jsonl(tmp_path / "talks.jsonl", [{"messages": messages}])
    with pytest.raises(
        UserError, match=r"line 1: .*(writes no tool calls; give|has no way to write tool calls)"
    ):
        prepare(source, template if template == "bytes" else folder(template), tmp_path / "out")


def test_a_template_that_answers_otherwise_than_it_asks_is_refused(folder: Any, tmp_path: Path) -> None:
    path = folder(CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"))
    with pytest.raises(
        UserError, match=r"line 1: message 2: the chat template writes an answer in another way"
    ):
        prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "out")


def test_a_template_finds_tools_and_documents_given_as_nothing_as_in_transformers(folder: Any) -> None:
    path = folder(
        "{% if tools is defined and tools is none and documents is none %}none{% else %}some{% endif %}"
        + CHATML
    )
    messages = TALKS[0]["messages"]
    template = find_template(path)
    assert template is not None
    assert (
        load_tokenizer(path).encode_batch([template.write(messages)])[0].tolist()
        == theirs(path, messages)["input_ids"]
    )


def test_what_is_no_template_is_said_once_with_its_file(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: \S+tokenizer_config.json is not a chat template: .*endfor"):
        prepare(
            jsonl(tmp_path / "talks.jsonl", TALKS), folder("{% for message in messages %}"), tmp_path / "out"
        )


def test_a_template_may_compute_but_not_reach_out(folder: Any, tmp_path: Path) -> None:
    path = folder("{{ ''.__class__.__mro__ }}{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(UserError, match="refuses it: access to attribute '__class__'"):
        prepare(jsonl(tmp_path / "talks.jsonl", TALKS), path, tmp_path / "out")
    path = folder(
        "{{ messages | tojson }}<é>{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}!{% "
        "endif %}"
    )
    template = find_template(path)
    assert template is not None
    assert template.write([{"role": "user", "content": "<é>"}]) == '[{"role": "user", "content": "<é>"}]<é>4'


LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TWICE = (
    "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ "
    "twice(60) }}"
)
SQUARED = "{% set n = namespace(x='xy') %}" + "{% set n.x = n.x | replace('', n.x) %}" * 7 + "{{ n.x }}"
LARGE = r"needs more than 512 MiB"
LONG = r"writes more than [\d,]+ characters for one conversation"
SLOW = r"takes more than 0\.3 s of processor time"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 'x' * 10**9 }}", LARGE),
        ("{{ 'x' * 2 * 10**9 }}{{ messages[0].content }}", LARGE),
        ("{% set n = messages | length * 10**9 %}{{ 'x' * n }}", LARGE),
        ("{{ messages | batch(10**9, 'x') | list }}", LARGE),
        ("{{ 'x' | center(10**9) }}", LARGE),
        ("{{ '%1000000000d' % 1 }}", LARGE),
        ("{{ 'x'.ljust(10**9) }}", LARGE),
        (SQUARED, LARGE),
        ("{{ 'x' * 10**7 }}", LONG),
        ("{% for i in range(9999) %}{{ i * 'x' }}{% endfor %}", LONG),
        (LOOPS, SLOW),
        (TWICE, SLOW),
        ("{{ 10 ** (10 ** 8) }}", SLOW),
        ("{{ lipsum(n=10**9) }}", SLOW),
    ],
)
def test_a_template_without_end_is_stopped_by_a_limit_that_is_named(
    folder: Any, tmp_path: Path, source: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == SLOW:
        monkeypatch.setattr(render, "SECONDS", 0.3)
    talks = jsonl(tmp_path / "talks.jsonl", TALKS)
    with pytest.raises(UserError, match=rf"line 1: the chat template in \S+tokenizer_config\.json {limit}"):
        prepare(talks, folder(source + CHATML), tmp_path / "out")
    template = find_template(folder(CHATML))
    assert template is not None
    assert template.write(TALKS[0]["messages"]).startswith("<|im_start|>user\nto be?"), (
        "others are written as ever"
    )


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ 'x' * 10**7 }}", f"the chat template in .*{LONG}, .*; correct the template, or shorten"),
        (LOOPS, f"the chat template in .*{SLOW}.*; correct the template, or shorten"),
        ("{% for x in y %}", "is not a chat template"),
    ],
)
@pytest.mark.parametrize("bad", [0, 3])
def test_a_template_that_cannot_be_used_is_one_problem_of_all_records(
    folder: Any, tmp_path: Path, source: str, problem: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == LOOPS:
        monkeypatch.setattr(render, "SECONDS", 0.3)
    talks = jsonl(tmp_path / "talks.jsonl", [*[{"messages": 5}] * bad, *TALKS[:1] * 30])
    with pytest.raises(UserError) as refusal:
        prepare(talks, folder(source + CHATML), tmp_path / "out")
    lines = str(refusal.value).splitlines()[1 if bad else 0 :]
    assert len(lines) == bad + 1
    assert re.search(rf"line {bad + 1}: .*{problem}", lines[-1])
    assert lines[-1].endswith("The records after it were not tried")


def test_a_process_that_writes_templates_is_replaced_when_it_is_gone_and_ended_with_this_one(
    folder: Any,
) -> None:
    template = find_template(folder(CHATML))
    assert template is not None
    expected = template.write(TALKS[0]["messages"])
    first = render.renderer()
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert template.write(TALKS[0]["messages"]) == expected
    second = render.renderer()
    assert second.pid != first.pid
    second.close()
    assert not psutil.pid_exists(second.pid)


def test_a_conversation_without_a_template_is_refused_and_bytes_have_one(bpe: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "talks.jsonl", TALKS)
    with pytest.raises(UserError, match=r"line 1: a conversation, and the tokenizer has no chat template"):
        prepare(source, bpe, tmp_path / "out")
    prepare(source, "bytes", tmp_path / "out")
    ids, learnt = documents(tmp_path / "out")[0]
    assert ids == [*b"user: to be?\nassistant: or not to be", 256]
    assert learnt == [False] * 24 + [True] * 13


def test_a_prepared_folder_keeps_how_its_tokenizer_writes_conversations(folder: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "talks.jsonl", TALKS)
    prepare(source, folder(CHATML), tmp_path / "out")
    assert find_template(tmp_path / "out") == replace(
        find_template(folder(CHATML)), file=str(tmp_path / "out/tokenizer_config.json")
    )
    prepare(source, "bytes", tmp_path / "out")
    assert find_template(tmp_path / "out") is None


def test_a_conversation_of_which_no_token_is_left_to_learn_harms_no_other(tmp_path: Path) -> None:
    """As of a tokenizer that drops characters it does not know."""
    tokenizer = Tokenizer(models.BPE({"</s>": 0, ":": 1, "h": 2}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ ':' if message.role == 'user' }}{{ message.content }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    source = jsonl(tmp_path / "talks.jsonl", [said("h", "h"), said("h", "?")])
    data = Data(
        source=str(source),
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache=str(tmp_path / "cache"),
        sequence_length=4,
    )
    rows = Dataset.open(data, 0).sequences(0, 1)
    assert rows.inputs.tolist() == [[1, 2, 2, 1]]
    assert rows.targets.tolist() == [[IGNORED, 2, IGNORED, IGNORED]]


def test_damaged_answers_are_noticed(tmp_path: Path) -> None:
    prepare(jsonl(tmp_path / "talks.jsonl", TALKS), "bytes", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.answers")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="answers is damaged: its checksum is wrong"):
        Tokens.open(tmp_path / "out")
