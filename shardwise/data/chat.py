"""Conversations, and prompts with their completion, as text of which the model learns to say the answers.

A conversation is written the way the model was taught to read it, by the chat template that came with its
tokenizer: a small program in Jinja, run by the library that the transformers library runs it with, in a
sandbox and within limits, since it comes from elsewhere (render.py). The text is then what
`apply_chat_template` gives, character for character.

Which characters are the assistant's? A template that marks them (`{% generation %}`) says so. Any other is
asked what it writes before the answer, for a model to go on from, and what once the answer is there. The
answer is the difference, up to the mark that ends it; white space that follows is the template's, and no
model need say it. A template may also write a message in another way once others follow (some leave earlier
thoughts out). Then a conversation of n answers becomes n texts, each as the model will have it before it when
it gives that answer, with that answer alone to be learnt. What cannot be told apart is refused.

The content of a message is text, a list of parts of text, or null beside tool calls. Null reaches the
template as it is. So do parts, where the template takes them: for a message with one part it writes what it
writes for the text of that part. Other templates were written for strings, and get the parts joined without a
separator, as templates that take parts write them.
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

from shardwise.config.pretrained import TOKENIZER_CONFIG, file_of, tokenizer_settings
from shardwise.data.render import Failed, NotATemplate, Refused, Request, renderer
from shardwise.errors import UserError, shown
from shardwise.files import read_bytes, reading

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
"""Fields of a record."""
TOOL_CALLS = "tool_calls"
"""Field of a message whose content may be null."""
FILE = "chat_template.jinja"
FILES = (FILE, TOKENIZER_CONFIG)
"""Those that say how conversations are written, beside a tokenizer.json."""
BYTES_END = "\U0010ffff"
"""Stands in text for the id that ends a document of bytes; Unicode keeps it from being a character."""
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
"""What a template may ask for and finds given as nothing, as in the transformers library: `is defined`, and
`is none`."""
_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ue000{_NONCE}\ue001", f"\ue002{_NONCE}\ue003"
"""Around what a template marks; they are taken out again, and no text of a user's has them."""

Span = tuple[int, int]
"""The first character, and the one after the last."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class AnsweredText:
    """A text and the answers in it."""

    text: str
    answers: tuple[Span, ...]
    closed: bool = False
    """Whether the end-of-document token follows, as part of the last answer; a template writes its own
    end."""


@dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written."""

    source: str
    """In Jinja."""
    tokens: Mapping[str, Any]
    """Special tokens by the names that a template calls them by: `eos_token` and others."""
    file: str
    """Where it is from, for messages."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two only if they write the same."""
        return hashlib.sha256(
            json.dumps([self.source, dict(self.tokens)], sort_keys=True).encode()
        ).hexdigest()[:32]

    def write(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The conversation as text; `generation_prompt`: up to where the assistant's answer begins."""
        return self._written(messages, generation_prompt)[0]

    def answered(self, messages: Sequence[Message]) -> list[AnsweredText]:
        """The conversation up to its last answer: one text, or one for each answer if a template writes it in
        several ways."""
        messages = [self._taken(message) for message in messages]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for turn in turns:
            self._check_tool_calls(messages[: turn + 1])
        whole, marked = self._written(messages[: turns[-1] + 1])
        if self._marks:
            if not marked:
                raise UserError("the chat template marks nothing of it as an answer ({% generation %})")
            return [AnsweredText(whole, marked)]
        texts = [self._last_answer(messages[: turn + 1]) for turn in turns]
        if all(whole.startswith(text.text[: text.answers[0][1]]) for text in texts):
            return [AnsweredText(whole, tuple(text.answers[0] for text in texts))]
        return texts

    def mark_after_answers(self) -> str:
        """What it puts behind an answer; nothing where that cannot be told."""
        said = "an answer"
        try:
            written = self.write(
                [{"role": "user", "content": "a question"}, {"role": "assistant", "content": said}]
            )
        except UserError:
            return ""
        _, found, mark = written.rstrip().rpartition(said)
        return mark if found else ""

    def _taken(self, message: Message) -> Message:
        """The message as this template takes it: parts of text joined, unless it takes parts."""
        if not isinstance(message.get("content"), list) or self._takes_parts(message["role"]):
            return message
        return {**message, "content": text_of(message["content"])}

    def _takes_parts(self, role: str) -> bool:
        """Whether the template writes a message of one part of text as it writes that text."""
        if role not in self._known_roles:
            before: list[Message] = (
                [] if role in ("system", "developer", "user") else [{"role": "user", "content": "a question"}]
            )
            after: list[Message] = (
                [{"role": "user", "content": "a question"}] if role in ("system", "developer") else []
            )
            with_content = (
                [*before, {"role": role, "content": content}, *after]
                for content in ("some words", [text_part("some words")])
            )
            try:
                text, parts = (self.write(messages) for messages in with_content)
                self._known_roles[role] = text == parts
            except UserError:  # it is asked again with the text, and what is wrong with that is said then
                self._known_roles[role] = False
        return self._known_roles[role]

    @cached_property
    def _known_roles(self) -> dict[str, bool]:
        return {}

    def _check_tool_calls(self, messages: Sequence[Message]) -> None:
        """Refuse an answer of tool calls alone that the template leaves out, or writes as `None`."""
        *before, last = messages
        if text_of(last.get("content")).strip():
            return
        with_calls, without_calls = self.write(messages), None
        with suppress(UserError):  # a template that refuses a message without them does write them
            without_calls = self.write(
                [*before, {key: value for key, value in last.items() if key != TOOL_CALLS}]
            )
        if with_calls == without_calls:
            raise UserError(
                f"message {len(messages)} has tool calls and no text, and the chat template writes no tool "
                f"calls; give a "
                "data.tokenizer whose template does, or leave the conversation out"
            )

    def _last_answer(self, messages: Sequence[Message]) -> AnsweredText:
        before, text = self.write(messages[:-1], generation_prompt=True), self.write(messages)
        stop = len(text.rstrip())
        if not text.startswith(before) or stop <= len(before):
            raise UserError(
                f"message {len(messages)}: the chat template writes an answer in another way than it begins "
                f"one for the model, "
                "so what to learn of it cannot be told. Begin with a question, or mark answers in it by {% "
                "generation %}"
            )
        return AnsweredText(text, ((len(before), stop),))

    @cached_property
    def _marks(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def _written(
        self, messages: Sequence[Message], generation_prompt: bool = False
    ) -> tuple[str, tuple[Span, ...]]:
        variables = {
            "messages": messages,
            "add_generation_prompt": generation_prompt,
            **_ABSENT,
            **self.tokens,
        }
        try:
            said = renderer().render(Request(self.source, variables, (_OPEN, _CLOSE)))
        except NotATemplate as error:
            raise UserError(f"{self.file} is not a chat template: {error}") from None
        except Refused as error:
            raise UserError(f"the chat template refuses it: {error}") from None
        except Failed as error:
            raise UserError(f"the chat template in {self.file} {error}") from None
        return _without_marks(without_lone_surrogates(said))


def find_template(tokenizer: str | Path) -> ChatTemplate | None:
    """The template that is beside a tokenizer.json, given by its path or by its folder; None: there is
    none."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    settings = tokenizer_settings(folder)
    tokens = {name: spelling(settings[name]) for name in _SPECIAL if spelling(settings.get(name))}
    with reading(folder):
        path = file_of(folder, FILE)
        if path.is_file():
            return ChatTemplate(read_bytes(path).decode("utf-8", "replace"), tokens, str(path))
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return ChatTemplate(source, tokens, str(folder / TOKENIZER_CONFIG)) if isinstance(source, str) else None


def copy_template(tokenizer: str | Path, folder: Path) -> None:
    """Keep in a folder what `find_template` reads beside a tokenizer.json; nothing where there is none."""
    for name in FILES:
        with suppress(FileNotFoundError, UserError):
            (folder / name).write_bytes(read_bytes(file_of(Path(tokenizer).parent, name)))


def template_of_bytes() -> ChatTemplate:
    """Of the byte tokenizer: roles and colons, and the end of a document after each answer."""
    return ChatTemplate(BYTES_TEMPLATE, {"eos_token": BYTES_END}, "the template of `bytes`")


def answered_texts(
    values: Mapping[str, Any], template: ChatTemplate | None, where: str
) -> list[AnsweredText]:
    """The texts of a record that has messages, or a prompt and its completion."""
    if MESSAGES not in values:
        prompt, completion = (_text(values[name], f"{where}: `{name}`") for name in (PROMPT, COMPLETION))
        if not completion.strip():
            raise UserError(
                f"{where}: an empty `{COMPLETION}`, so there is nothing to learn; leave the record out"
            )
        return [
            AnsweredText(prompt + completion, ((len(prompt), len(prompt) + len(completion)),), closed=True)
        ]
    if template is None:
        raise UserError(
            f"{where}: a conversation, and the tokenizer has no chat template, which says how to write one. "
            f"Give as "
            f"data.tokenizer (or model.pretrained) a folder that has {FILE}, or `chat_template` in its "
            f"{TOKENIZER_CONFIG}"
        )
    messages = _messages(values[MESSAGES], where)
    try:
        return template.answered(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _messages(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: `{MESSAGES}` is {shown(value)}, not a list of messages with `role` and `content`"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}: message {number} is {shown(message)}, not an object with `role` and `content`"
            )
        content = _content(message, f"{where}: the content of message {number}")
        if message["role"] == "assistant" and not text_of(content).strip() and not message.get(TOOL_CALLS):
            raise UserError(
                f"{where}: message {number} is an empty answer; leave the conversation out, or end it before"
            )
        # A table has every field in every row, with nothing in those that a message lacks.
        given = {key: part for key, part in message.items() if part is not None}
        messages.append(given | ({"content": content} if "content" in message else {}))
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"{where}: no message has the role `assistant`, so there is nothing to learn; leave the "
            f"record out"
        )
    return messages


def _content(message: Mapping[str, Any], what: str) -> str | list[dict[str, str]] | None:
    """The content of a message: text, parts of text, or nothing beside tool calls."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get(TOOL_CALLS):
        return None
    if isinstance(content, list):
        return [_part(part, f"{what}, part {number},") for number, part in enumerate(content, start=1)]
    return _text(content, what)


def _part(part: object, what: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        found = f"is of type {shown(kind)}" if isinstance(part, dict) else f"is {shown(part)}"
        raise UserError(
            f'{what} {found}; only text is learnt from, {{"type": "text", "text": …}}. Leave the part out, '
            f"or the conversation"
        )
    return text_part(_text(part.get("text"), f"{what} `text`"))


def text_part(text: str) -> dict[str, str]:
    """A part of a message's content."""
    return {"type": "text", "text": text}


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """The text of a message, whose parts are joined; nothing of one without content."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} is {'null' if value is None else type(value).__name__}, not text")
    return without_lone_surrogates(value)


def without_lone_surrogates(text: str) -> str:
    """JSON escapes can spell half a character, which no tokenizer can encode; it becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def spelling(token: object) -> str | None:
    """Of a special token, as the files of tokenizers have it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """The text, and the spans that were marked in it."""
    spans, plain = [], ""
    for index, part in enumerate(text.split(_OPEN)):
        inside, _, rest = part.partition(_CLOSE) if index else ("", "", part)
        if inside:
            spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + rest
    return plain, tuple(spans)
