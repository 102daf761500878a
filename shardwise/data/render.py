"""Run chat templates in a process of their own, with limits of memory, time and length.

A chat template is a Jinja program from another source. Jinja's sandbox protects files and objects, but it
does not limit work: `'x' * 10**9`, nested loops, a filter that pads to any width, a macro that calls itself
twice. Some of these are single calls that Python cannot interrupt, and there are too many to forbid by name.
The kernel can limit all of them for a process:

- Memory is limited by RLIMIT_AS: an allocation above it is a MemoryError.
- Time is limited by a timer of the process's processor time (ITIMER_PROF), set for every conversation. When
  it expires, the kernel ends the process. A busy or suspended machine makes no difference.
- The written characters are counted as they are written.

It costs the start of a Python that imports only Jinja, about a tenth of a second, once; and about a tenth of
a millisecond for each conversation.

This file contains both sides. `renderer()` returns the side of this process. The other side is this file run
as a program; it imports nothing from shardwise, so that it starts quickly. Both sides exchange JSON. A value
that JSON cannot represent, such as a date from a table, becomes its text.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0
"""Limit of processor time for one conversation. Common templates take less than a hundredth of it."""
MEMORY = 512 << 20
"""Limit of the process's address space in bytes."""
CHARACTERS, GROWTH = 1 << 20, 16
"""A rendered conversation may have CHARACTERS characters, plus GROWTH for each character of its input."""
_LIMIT = "for one conversation, which is the limit"
_ADVICE = "correct the template, or shorten the conversation if only this one is too long"
_LENGTH = struct.Struct("<Q")
_MAX_COMPILED = 64
"""Maximum number of compiled templates that the process keeps."""


Compiled = dict[tuple[str, tuple[str, str]], "Template"]
"""Compiled templates by their source and marks."""


class InvalidTemplate(Exception):
    """The source is not a valid Jinja template."""


class TemplateRefused(Exception):
    """The template refuses this conversation, by an error of its own or of the sandbox."""


class TemplateFailed(Exception):
    """The template fails for this conversation. The message is a predicate, such as "fails at it: …"."""


class TemplateStopped(TemplateFailed):
    """The template reaches a limit, or its process cannot run. The message is a predicate, such as "needs
    more than …".
    """


_EXCEPTIONS = {
    "not a template": InvalidTemplate,
    "refused": TemplateRefused,
    "failed": TemplateFailed,
    "stopped": TemplateStopped,
}
"""Exceptions by the kind of the other process's answer."""


@dataclass(frozen=True)
class Request:
    """One conversation, and the template to render it with."""

    source: str
    variables: Mapping[str, object]
    marks: tuple[str, str]
    """Texts to insert before and after the content of a `{% generation %}` block."""


class _Limits(NamedTuple):
    """The limits for rendering one conversation."""

    seconds: float
    characters: int
    memory: int


class Renderer:
    """Starts the process that renders templates, sends requests to it, and ends it."""

    def __init__(self) -> None:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(MEMORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            reason = error.strerror or error
            raise TemplateStopped(f"cannot be run: no process for it could be started ({reason})") from None
        self.pid = self._process.pid
        self.owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def render(self, request: Request) -> str:
        """Return the text that the template writes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        variables = json.dumps(request.variables, default=str)
        limits = _Limits(SECONDS, CHARACTERS + GROWTH * (len(variables) + len(request.source)), MEMORY)
        try:
            with self._lock:
                message = json.dumps((request.source, variables, request.marks, limits))
                _send(self._process.stdin, message.encode())
                kind, text = json.loads(_received(self._process.stdout))
        except (OSError, EOFError):
            raise TemplateStopped(self._how_it_ended()) from None
        # After Ctrl-C, for example, this answer would still come and be taken for the next request's.
        except BaseException:
            self.close()
            raise
        if kind == "text":
            return str(text)
        raise _EXCEPTIONS[kind](text)

    def is_usable(self) -> bool:
        """Return whether the other process runs and was started by this process, not by one it was forked
        from.
        """
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the other process, if this process started it."""
        atexit.unregister(self.close)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return f"takes more than {SECONDS:g} s of processor time {_LIMIT}; {_ADVICE}"
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"cannot be run: its process was ended {how}"


_renderer: Renderer | None = None


def renderer() -> Renderer:
    """Return the renderer of this process. It is started at the first call."""
    global _renderer
    if _renderer is None or not _renderer.is_usable():
        _renderer = Renderer()
    return _renderer


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def _received(stream: IO[bytes]) -> bytes:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    content: bytes = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content


# The side of the other process.


def _serve(memory: int) -> None:
    """Answer requests until the other side closes the pipe."""
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process that asks decides when to end
    import jinja2  # imported before memory is limited  # noqa: F401

    with suppress(OSError, ValueError):  # the system may have no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    compiled: Compiled = {}
    while True:
        try:
            source, variables, marks, limits = json.loads(_received(sys.stdin.buffer))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits[0])
        answer = _answer(compiled, source, json.loads(variables), tuple(marks), _Limits(*limits))
        content = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, content)


def _answer(
    compiled: Compiled, source: str, variables: Mapping[str, object], marks: tuple[str, str], limits: _Limits
) -> tuple[str, str]:
    """Render one conversation. Return the kind of the answer and its text."""
    from jinja2 import TemplateError

    kind = "not a template"
    try:
        if (source, marks) not in compiled:
            if len(compiled) >= _MAX_COMPILED:
                compiled.clear()
            compiled[source, marks] = _environment(marks).from_string(source)
        kind = "refused"
        return "text", _joined(compiled[source, marks].generate(**variables), limits.characters)
    except TemplateError as error:
        return kind, str(error)
    except MemoryError:
        return "stopped", f"needs more than {limits.memory >> 20} MiB {_LIMIT}; {_ADVICE}"
    except TemplateStopped as error:
        return "stopped", str(error)
    except Exception as error:  # a program may fail in any way
        return "failed", f"fails at it: {type(error).__name__}: {error}"


def _joined(pieces: Iterator[str], most: int) -> str:
    """Join the pieces that a template writes, up to the limit of characters."""
    written, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise TemplateStopped(f"writes more than {most:,} characters {_LIMIT} for its length; {_ADVICE}")
        written.append(piece)
    return "".join(written)


def _environment(marks: tuple[str, str]) -> ImmutableSandboxedEnvironment:
    """Return Jinja as chat templates expect it: blocks without surrounding white space, and three more
    functions.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja requires a class attribute)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter would escape the text for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
