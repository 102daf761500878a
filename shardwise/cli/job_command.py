"""The class of commands that take a job: it answers an unknown option with the key of the job to write
instead.

`shardwise train job.toml --steps 10` has no such option. Settings of a job are written `section.key=value`,
and the message names the key and the value that were meant. All other unknown options are left to typer,
which shows the usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from shardwise.config.other_names import JobKey


class JobCommand(TyperCommand):
    """A command whose arguments are a job and changes to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as typer does, but refuse options that mean a key of the job."""
        parameters = self.get_params(ctx)
        known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
        if problems := list(_mistaken(args, known)):
            from shardwise.errors import ConfigError, UserError

            raise UserError(problems[0]) if len(problems) == 1 else ConfigError("the command", problems)
        return super().parse_args(ctx, args)


def _mistaken(arguments: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yield a problem for each unknown option that means a key of the job."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for index, argument in enumerate(arguments[:end]):
        option = argument.partition("=")[0]
        if not option.startswith("--") or any(f"{name}-".startswith(f"{option}-") for name in known):
            continue  # typer knows the option, or names the longer one that begins like it
        if (ours := _key_of(option)) is None:
            continue
        yield _advice(argument, ours, arguments[index + 1] if index + 1 < end else "")


def _advice(argument: str, ours: JobKey, following: str) -> str:
    """Return what to write instead of an option. Its value may be the argument that follows it."""
    _, equals, value = argument.partition("=")
    if not equals and not ours.value and not following.startswith("--") and "=" not in following:
        argument, value = f"{argument} {following}".strip(), following
    write = f"write {ours.setting(value or 'VALUE')}" if ours.key else ours.note
    return f"{argument}: not an option; {write}"


def _key_of(option: str) -> JobKey | None:
    """Return the key of a job that an option means, by its name or as --section.key."""
    from shardwise.config.other_names import JobKey, job_key
    from shardwise.config.schema import SECTIONS, keys_of

    section, dot, key = option.removeprefix("--").partition(".")
    if not dot:
        return job_key(section)
    if section not in SECTIONS:
        return None
    return JobKey(f"{section}.{key}") if key in keys_of(section) else job_key(key, section)
