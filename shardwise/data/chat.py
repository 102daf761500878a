"""Write conversations, and prompts with their completion, as text in which the model learns the answers.

A conversation is written in the way in which the model was trained to read it, by the chat template of its
tokenizer: a small Jinja program. It comes from another source, so it runs in a sandbox and with limits
(render.py), with the same library as in transformers. The text is therefore exactly that of
`apply_chat_template`.

Which characters belong to the assistant? A template that marks them (`{% generation %}`) says so. For any
other template, shardwise renders the conversation before an answer, as a prompt for the model, and again with
the answer. The answer is the difference, up to the mark that ends it. White space after it belongs to the
template and is not learned. A template may write a message differently once others follow (some leave earlier
thoughts out). Then a conversation with n answers becomes n texts, each as the model will see it when it gives
that answer, and only that answer is learned. If the answer cannot be determined, the conversation is refused.

The content of a message is text, a list of text parts, or null beside tool calls. The template receives null
as it is. It also receives parts if it supports them, which is the case if it writes a message with one part
as it writes the text of that part. Other templates were written for strings and receive the joined parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.config.pretrained_folder import TOKENIZER_CONFIG, file_of, tokenizer_settings
from shardwise.data.render import (
    InvalidTemplate,
    Request,
    TemplateFailed,
    TemplateRefused,
    TemplateStopped,
    renderer,
)
from shardwise.errors import UserError, shown
from shardwise.files import read_bytes, reading

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
"""Names of the fields of a record."""
TOOL_CALLS = "tool_calls"
"""Field of a message that allows its content to be null."""
FILE = "chat_template.jinja"
"""Name of the file of a chat template."""
FILES = (FILE, TOKENIZER_CONFIG)
"""Files beside a tokenizer.json that say how conversations are written."""
BYTES_END = "\U0010ffff"
"""Character that stands for the end-of-document id of bytes. Unicode guarantees that no text contains it."""
BYTES_TEMPLATE = """\
{% for message in messages %}\
{% if message.role not in ['system', 'user', 'assistant'] %}\
{{ raise_exception('the roles are system, user and assistant, not ' ~ message.role) }}{% endif %}\
{% if message.content is not string %}\
{{ raise_exception('a message without content: the byte tokenizer has no way to write tool calls') }}\
{% endif %}\
{{ message.role }}: {{ message.content }}{{ eos_token if message.role == 'assistant' else '\\n' }}\
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ABSENT = {"tools": None, "documents": None}
"""Variables that a template may test and that are always None, as in transformers."""
_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ue000{_NONCE}\ue001", f"\ue002{_NONCE}\ue003"
"""Marks around what a template marks as an answer. They are removed again, and no text of a user contains
them.
"""


class TemplateUnusable(UserError):
    """The chat template is not valid, reaches a limit, or cannot be run. It would probably fail for each
    further record, and take as long.
    """


Span = tuple[int, int]
"""First character, and the character after the last."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class AnsweredText:
    """A text and the positions of the answers in it."""

    text: str
    answers: tuple[Span, ...]
    closed: bool = False
    """Whether the end-of-document token follows, as part of the last answer. Templates write an end of their
    own.
    """


@dataclass(frozen=True)
class ChatTemplate:
    """A template that writes conversations."""

    source: str
    """Source of the template in Jinja."""
    tokens: Mapping[str, str | None]
    """Special tokens by the names that templates use for them, such as `eos_token`."""
    file: str
    """File that the template comes from, for messages."""

    @cached_property
    def fingerprint(self) -> str:
        """Text that is equal for two templates only if they write the same."""
        content = json.dumps([self.source, dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def write(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the conversation as text; with `generation_prompt`, up to where the assistant's answer
        begins.
        """
        return self._render(messages, generation_prompt)[0]

    def answered(self, messages: Sequence[Message]) -> list[AnsweredText]:
        """Return the conversation up to its last answer.

        It is one text, or one for each answer if the template writes earlier messages differently later on.
        """
        messages = [self._supported(message) for message in messages]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for turn in turns:
            self._check_tool_calls(messages[: turn + 1])
        whole, marked = self._render(messages[: turns[-1] + 1])
        if self._marks:
            if not marked:
                raise UserError("the chat template marks nothing of it as an answer ({% generation %})")
            return [AnsweredText(whole, marked)]
        texts = [self._last_answer(messages[: turn + 1]) for turn in turns]
        if all(whole.startswith(text.text[: text.answers[0][1]]) for text in texts):
            return [AnsweredText(whole, tuple(text.answers[0] for text in texts))]
        return texts

    def mark_after_answers(self) -> str:
        """Return the text that the template puts after an answer; empty if that cannot be determined."""
        answer = "an answer"
        question = {"role": "user", "content": "a question"}
        try:
            text = self.write([question, {"role": "assistant", "content": answer}])
        except UserError:
            return ""
        _, matched, mark = text.rstrip().rpartition(answer)
        return mark if matched else ""

    def _supported(self, message: Message) -> Message:
        """Return the message in a form that this template supports: with joined parts, unless it supports
        parts.
        """
        if not isinstance(message.get("content"), list) or self._takes_parts(message["role"]):
            return message
        return {**message, "content": text_of(message["content"])}

    def _takes_parts(self, role: str) -> bool:
        """Return whether the template writes a message with one text part as it writes that text."""
        if role not in self._known_roles:
            question: list[Message] = [{"role": "user", "content": "a question"}]
            before = [] if role in ("system", "developer", "user") else question
            after = question if role in ("system", "developer") else []
            with_content = (
                [*before, {"role": role, "content": content}, *after]
                for content in ("some words", [text_part("some words")])
            )
            try:
                text, parts = (self.write(messages) for messages in with_content)
                self._known_roles[role] = text == parts
            except UserError:  # the text is rendered later, and an error in it is reported then
                self._known_roles[role] = False
        return self._known_roles[role]

    @cached_property
    def _known_roles(self) -> dict[str, bool]:
        return {}

    def _check_tool_calls(self, messages: Sequence[Message]) -> None:
        """Raise a UserError if the template leaves out an answer that consists of tool calls only, or writes
        `None`.
        """
        *before, last = messages
        if text_of(last.get("content")).strip():
            return
        with_calls, without_calls = self.write(messages), None
        with suppress(UserError):  # a template that refuses a message without tool calls does write them
            content = {key: value for key, value in last.items() if key != TOOL_CALLS}
            without_calls = self.write([*before, content])
        if with_calls == without_calls:
            raise UserError(
                f"message {len(messages)} has tool calls and no text, and the chat template writes no tool "
                "calls; give a data.tokenizer whose template does, or leave the conversation out"
            )

    def _last_answer(self, messages: Sequence[Message]) -> AnsweredText:
        """Return the conversation with its last message as the only answer."""
        before, text = self.write(messages[:-1], generation_prompt=True), self.write(messages)
        stop = len(text.rstrip())
        if not text.startswith(before) or stop <= len(before):
            raise UserError(
                f"message {len(messages)}: the chat template writes an answer in another way than it begins "
                "one for the model, so what to learn of it cannot be told. Begin with a question, or mark "
                "answers in it by {% generation %}"
            )
        return AnsweredText(text, ((len(before), stop),))

    @cached_property
    def _marks(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def _render(
        self, messages: Sequence[Message], generation_prompt: bool = False
    ) -> tuple[str, tuple[Span, ...]]:
        """Return the text of the conversation, and the spans that the template marks as answers."""
        given = {"messages": messages, "add_generation_prompt": generation_prompt}
        variables = {**given, **_ABSENT, **self.tokens}
        try:
            text = renderer().render(Request(self.source, variables, (_OPEN, _CLOSE)))
        except InvalidTemplate as error:
            raise TemplateUnusable(f"{self.file} is not a chat template: {error}") from None
        except TemplateRefused as error:
            raise UserError(f"the chat template refuses it: {error}") from None
        except TemplateStopped as error:
            raise TemplateUnusable(f"the chat template in {self.file} {error}") from None
        except TemplateFailed as error:
            raise UserError(f"the chat template in {self.file} {error}") from None
        return _without_marks(without_lone_surrogates(text))


def find_template(tokenizer: str | Path) -> ChatTemplate | None:
    """Return the template beside a tokenizer.json, given by its path or its folder; None if there is none."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    settings = tokenizer_settings(folder)
    tokens = {name: spelling(settings[name]) for name in _SPECIAL if spelling(settings.get(name))}
    with reading(folder):
        path = file_of(folder, FILE)
        if path.is_file():
            return ChatTemplate(read_bytes(path).decode("utf-8", "replace"), tokens, str(path))
    source = settings.get("chat_template")
    if isinstance(source, list):  # a list of named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return ChatTemplate(source, tokens, str(folder / TOKENIZER_CONFIG)) if isinstance(source, str) else None


def copy_template(tokenizer: str | Path, folder: Path) -> None:
    """Copy the files that `find_template` reads beside a tokenizer.json, if there are any, to a folder."""
    for name in FILES:
        with suppress(FileNotFoundError, UserError):
            (folder / name).write_bytes(read_bytes(file_of(Path(tokenizer).parent, name)))


def template_of_bytes() -> ChatTemplate:
    """Return the template of the byte tokenizer: role, colon and content, and the end-of-document id after
    answers.
    """
    return ChatTemplate(BYTES_TEMPLATE, {"eos_token": BYTES_END}, "the template of `bytes`")


def answered_texts(
    values: Mapping[str, object], template: ChatTemplate | None, where: str
) -> list[AnsweredText]:
    """Return the texts of a record that has messages, or a prompt and its completion."""
    if MESSAGES not in values:
        prompt, completion = (_text(values[name], f"{where}: `{name}`") for name in (PROMPT, COMPLETION))
        if not completion.strip():
            problem = f"{where}: an empty `{COMPLETION}`, so there is nothing to learn"
            raise UserError(f"{problem}; leave the record out")
        answer = (len(prompt), len(prompt) + len(completion))
        return [AnsweredText(prompt + completion, (answer,), closed=True)]
    if template is None:
        raise UserError(
            f"{where}: a conversation, and the tokenizer has no chat template, which says how to write one. "
            f"Give as data.tokenizer (or model.pretrained) a folder that has {FILE}, or `chat_template` in "
            f"its {TOKENIZER_CONFIG}"
        )
    messages = _messages(values[MESSAGES], where)
    try:
        return template.answered(messages)
    except TemplateUnusable as error:
        raise TemplateUnusable(f"{where}: {error}. The records after it were not tried") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _messages(value: object, where: str) -> list[Message]:
    """Return the messages of a record, checked."""
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: `{MESSAGES}` is {shown(value)}, not a list of messages with `role` and `content`"
        )
    messages = [_message(message, number, where) for number, message in enumerate(value, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        problem = f"{where}: no message has the role `assistant`, so there is nothing to learn"
        raise UserError(f"{problem}; leave the record out")
    return messages


def _message(message: object, number: int, where: str) -> Message:
    """Return one message of a record, checked, and without fields that are null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(
            f"{where}: message {number} is {shown(message)}, not an object with `role` and `content`"
        )
    content = _content(message, f"{where}: the content of message {number}")
    if message["role"] == "assistant" and not text_of(content).strip() and not message.get(TOOL_CALLS):
        raise UserError(
            f"{where}: message {number} is an empty answer; leave the conversation out, or end it before"
        )
    # A table has every field in every row, and null in those that a message does not have.
    given = {key: part for key, part in message.items() if part is not None}
    return given | ({"content": content} if "content" in message else {})


def _content(message: Message, what: str) -> str | list[dict[str, str]] | None:
    """Return the content of a message: text, text parts, or None beside tool calls."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get(TOOL_CALLS):
        return None
    if isinstance(content, list):
        return [_part(part, f"{what}, part {number},") for number, part in enumerate(content, start=1)]
    return _text(content, what)


def _part(part: object, what: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        problem = f"is of type {shown(kind)}" if isinstance(part, dict) else f"is {shown(part)}"
        raise UserError(
            f'{what} {problem}; only text is learnt from, {{"type": "text", "text": …}}. '
            "Leave the part out, or the conversation"
        )
    return text_part(_text(part.get("text"), f"{what} `text`"))


def text_part(text: str) -> dict[str, str]:
    """Return a text as a part of a message's content."""
    return {"type": "text", "text": text}


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """Return the text of a message's content, with its parts joined; empty if there is no content."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} is {'null' if value is None else type(value).__name__}, not text")
    return without_lone_surrogates(value)


def without_lone_surrogates(text: str) -> str:
    """Return the text with U+FFFD for surrogates without a partner.

    JSON escapes can spell half of a character, which no tokenizer can encode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def spelling(token: object) -> str | None:
    """Return the text of a special token as a tokenizer's files contain it; None if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """Return the text without the marks, and the spans that were marked."""
    spans, plain = [], ""
    for index, part in enumerate(text.split(_OPEN)):
        inside, _, rest = part.partition(_CLOSE) if index else ("", "", part)
        if inside:
            spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + rest
    return plain, tuple(spans)
