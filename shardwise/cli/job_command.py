"""Commands that take a job: an option of another program is answered with the key of the job to write
instead.

`shardwise train job.toml --steps 10` has no such option. Settings of a job are written `section.key=value`,
and the message names the key and the value that were meant. All other options are left to typer, which shows
the usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from shardwise.config.other_names import OurKey


class JobCommand(TyperCommand):
    """A command whose arguments are a job and changes to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does it, but for options that are keys of a job under another name."""
        known = {
            name
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        if problems := list(_mistaken(args, known)):
            from shardwise.errors import ConfigError, UserError

            raise UserError(problems[0]) if len(problems) == 1 else ConfigError("the command", problems)
        return super().parse_args(ctx, args)


def _mistaken(arguments: Sequence[str], known: set[str]) -> Iterator[str]:
    """A problem for each option that is not known and means a key of a job."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for index, argument in enumerate(arguments[:end]):
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in known or (ours := _key_of(option)) is None:
            continue
        follows = arguments[index + 1] if index + 1 < end else ""
        if not equals and not ours.value and not follows.startswith("--") and "=" not in follows:
            argument, value = f"{argument} {follows}".strip(), follows
        write = f"write {ours.setting(value or 'VALUE')}" if ours.key else ours.note
        yield f"{argument}: not an option; {write}"


def _key_of(option: str) -> OurKey | None:
    """The key of a job that an option means, by its name or as --section.key."""
    from shardwise.config.other_names import OurKey, our_key
    from shardwise.config.schema import SECTIONS, keys_of

    section, dot, key = option.removeprefix("--").partition(".")
    if not dot:
        return our_key(section)
    if section not in SECTIONS:
        return None
    return OurKey(f"{section}.{key}") if key in keys_of(section) else our_key(key, section)
