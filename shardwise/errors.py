"""The one exception that means "the user can mend this".

Everything a person can put right (a misspelt key, a missing file, a full disk, an unsupported torch) is raised as a
`UserError`. The command line prints its message, without a traceback, and leaves with status 2. Any other exception is a
fault of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """What is wrong, where, and what to do about it."""

    status = 2


class RunFailed(UserError):
    """The job was well formed, but the run could not go on (a non-finite loss, a dead worker)."""

    status = 1


class ConfigError(UserError):
    """Every problem found in one configuration, reported together."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source} has {count}:", *(f"  {p}" for p in problems)]))
