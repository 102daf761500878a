"""Chat templates, run by a process of their own within limits of memory, time and length.

A chat template is a program in Jinja that comes from elsewhere. Jinja's sandbox keeps it from files and
objects, but not from work: `'x' * 10**9`, loops in loops, a filter that pads to any width, a macro that calls
itself twice. Each of these is a single call that Python cannot interrupt, or one of too many to forbid by
name. The kernel can limit all of them, for a process:

- memory by RLIMIT_AS: what asks for more gets a MemoryError;
- time by a timer of the processor time that the process uses (ITIMER_PROF), set anew for every conversation:
  when it is over, the kernel ends the process. A machine that is busy or suspended changes nothing;
- what is written is counted as it is written.

It costs the start of a Python that imports nothing but Jinja, about a tenth of a second, once; and about a
tenth of a millisecond for each conversation.

This file is both ends. `renderer()` gives this process's end. The other is this file run as a program; it
imports nothing of shardwise, so that it starts at once. Both write JSON. What JSON has no word for, such as a
date from a table, becomes its text.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, NamedTuple

SECONDS = 2.0
"""Processor time for one conversation; those that people write take less than a hundredth of it."""
MEMORY = 512 << 20
"""Bytes of address space of the process."""
CHARACTERS, GROWTH = 1 << 20, 16
"""A rendered conversation may have CHARACTERS characters, plus GROWTH for each character of its input."""
_LENGTH = struct.Struct("<Q")
_KEPT = 64
"""Compiled templates that the process keeps."""


class NotATemplate(Exception):
    """The source is not a template in Jinja."""


class Refused(Exception):
    """The template refuses this conversation, by its own words, or as the sandbox does."""


class Failed(Exception):
    """The template fails at this conversation, or reaches a limit. The message is a predicate: "needs more
    than …"."""


@dataclass(frozen=True)
class Request:
    """One conversation, and the template to render it with."""

    source: str
    variables: Mapping[str, Any]
    marks: tuple[str, str]
    """Texts to put before and after what stands in a `{% generation %}` block."""


class _Limits(NamedTuple):
    """The limits for rendering one conversation."""

    seconds: float
    characters: int
    memory: int


class Renderer:
    """Starts the process that renders, sends it requests, and ends it."""

    def __init__(self) -> None:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({__file__!r}, "
            f"run_name='__main__')"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(MEMORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise Failed(
                f"cannot be run: no process for it could be started ({error.strerror or error})"
            ) from None
        self.pid = self._process.pid
        self.owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def render(self, request: Request) -> str:
        """The text that the template writes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        variables = json.dumps(request.variables, default=str)
        limits = _Limits(SECONDS, CHARACTERS + GROWTH * (len(variables) + len(request.source)), MEMORY)
        try:
            with self._lock:
                _send(
                    self._process.stdin,
                    json.dumps((request.source, variables, request.marks, limits)).encode(),
                )
                kind, text = json.loads(_received(self._process.stdout))
        except (OSError, EOFError):
            raise Failed(self._how_it_ended()) from None
        except (
            BaseException
        ):  # Ctrl-C, say: the answer is still to come, and would be taken for that of the next request
            self.close()
            raise
        if kind == "text":
            return str(text)
        raise {"not a template": NotATemplate, "refused": Refused}.get(kind, Failed)(text)

    def is_usable(self) -> bool:
        """Whether the other process is there, and is not that of a process which this one was forked from."""
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the other process, if it was started by this one."""
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
            return f"takes more than {SECONDS:g} s of processor time for one conversation, which is the limit"
        return (
            f"cannot be run: its process was ended "
            f"{f'by signal {-status}' if status < 0 else f'with status {status}'}"
        )


_renderer: Renderer | None = None


def renderer() -> Renderer:
    """The renderer of this process; it is started by the first who asks."""
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


# The other end.


def _serve(memory: int) -> None:
    """Answer requests until nobody is left to ask."""
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # whoever asks decides when to end
    import jinja2  # before memory is limited  # noqa: F401

    with suppress(OSError, ValueError):  # a system that has no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    compiled: dict[Any, Any] = {}
    while True:
        try:
            source, variables, marks, limits = json.loads(_received(sys.stdin.buffer))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits[0])
        answer = json.dumps(
            _answered(compiled, source, json.loads(variables), tuple(marks), _Limits(*limits))
        ).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, answer)


def _answered(
    compiled: dict[Any, Any], source: str, variables: dict[str, Any], marks: tuple[str, str], limits: _Limits
) -> tuple[str, str]:
    """What kind of answer it is, and its text."""
    from jinja2 import TemplateError

    kind = "not a template"
    try:
        if (source, marks) not in compiled:
            if len(compiled) >= _KEPT:
                compiled.clear()
            compiled[source, marks] = _environment(marks).from_string(source)
        kind = "refused"
        return "text", _joined(compiled[source, marks].generate(**variables), limits.characters)
    except TemplateError as error:
        return kind, str(error)
    except MemoryError:
        return "failed", f"needs more than {limits.memory >> 20} MiB for one conversation, which is the limit"
    except Failed as error:
        return "failed", str(error)
    except Exception as error:  # it is a program, and may fail in any way
        return "failed", f"fails at it: {type(error).__name__}: {error}"


def _joined(pieces: Iterator[str], most: int) -> str:
    """The text that a template writes piece by piece, as far as it may."""
    written, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise Failed(
                f"writes more than {most:,} characters for one conversation, which is the limit for its "
                f"length"
            )
        written.append(piece)
    return "".join(written)


def _environment(marks: tuple[str, str]) -> Any:
    """Jinja as chat templates are written for: white space of blocks trimmed, and three words more."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja's own way)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, **options
        )  # jinja's own escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
