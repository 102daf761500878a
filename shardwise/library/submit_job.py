"""Write the file that submits a job to a scheduler, and submit it. A job with a mistake is refused before
anything is written, and a refused submission leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.drivers.driver import WorkerCounts
    from shardwise.section import Section
    from shardwise.submit.scheduler import Request, Scheduler


@dataclass(frozen=True)
class Nodes:
    """The nodes that a command asks for."""

    count: int
    spares: int
    workers: int | None
    """Workers of each node; None: as the profile or the layout says."""


@dataclass(frozen=True)
class Submission:
    """A file that submits a job, and the job if it was submitted."""

    scheduler: Scheduler
    request: Request
    file: Path
    text: str

    @property
    def command(self) -> list[str]:
        """The command of the scheduler's own client that submits the file."""
        return self.scheduler.command(self.file)

    def write(self) -> None:
        """Write the file, and replace an earlier one."""
        with _written(self.file, self.text):
            pass

    def submit(self) -> tuple[str, Mapping[str, str]]:
        """Write the file and submit it. Return the job's id, and the commands that follow the job."""
        with _written(self.file, self.text):
            job = self.scheduler.submit(self.file)
        return job, self.scheduler.follow(job, self.request)


def prepare(
    job: Path, overrides: Sequence[str], scheduler: str, nodes: Nodes, profile: Path | None
) -> Submission:
    """Check a job and the profile, and return the file that submits the job. All problems are raised
    together."""
    from shardwise.config import read
    from shardwise.library.check_job import checks_of_submission
    from shardwise.submit.registry import scheduler_named

    chosen = scheduler_named(scheduler)
    settings, problems = _settings(chosen, scheduler, profile)
    per_node = nodes.workers or chosen.workers_of_node(settings)

    def request_of(config: Config) -> Request:
        return _request(job, overrides, nodes, _workers(config, nodes, per_node), config)

    config = read(
        job,
        overrides,
        checks=[
            lambda _: problems,
            *checks_of_submission(
                lambda config: _counts(config, nodes, _workers(config, nodes, per_node)),
                lambda config: chosen.problems(request_of(config)),
            ),
        ],
    )
    request = request_of(config)
    return Submission(chosen, request, *chosen.file(request, settings))


def _settings(scheduler: Scheduler, name: str, profile: Path | None) -> tuple[Section, Sequence[str]]:
    """Return the scheduler's table of the profile, and what is wrong with the profile. With a wrong table the
    defaults are returned, so that the job is checked too."""
    from shardwise.errors import ConfigError
    from shardwise.submit.profile import read_profile

    try:
        return read_profile(profile, name), ()
    except ConfigError as error:
        return scheduler.settings(), [f"{error.source}: {problem}" for problem in error.problems]
    except UserError as error:
        return scheduler.settings(), [str(error)]


def _workers(config: Config, nodes: Nodes, per_node: int | None) -> int | None:
    """Return the number of workers of a node: the given one, or that of a complete layout; else None."""
    from shardwise.library.start import workers_here

    if per_node is None and config.layout.data > 0:
        return workers_here(config, nodes=nodes.count)
    return per_node


def _counts(config: Config, nodes: Nodes, workers: int | None) -> WorkerCounts | None:
    """Return how many workers take part if that is known. Raise an error if the job cannot have so many."""
    from shardwise.library.start import worker_counts
    from shardwise.mesh import Node

    if workers is None:
        return None
    everyone = workers * nodes.count
    node = Node(nodes.count + nodes.spares, 0, workers, "", 0, "", "")
    return worker_counts(config, node, workers, (everyone, everyone) if nodes.spares else (None, None))


def _request(
    job: Path, overrides: Sequence[str], nodes: Nodes, workers: int | None, config: Config
) -> Request:
    """Return the training command of the job. With spares, the workers of `nodes.count` nodes train."""
    from shardwise.submit.scheduler import Request

    if nodes.spares and workers is None:
        unknown = "it is not known how many workers a node has"
        raise UserError(f"--spares {nodes.spares}: {unknown}; give --workers")
    arguments = ["train", str(job), *overrides]
    if workers is not None:
        arguments += ["--workers", str(workers)]
        everyone = str(workers * nodes.count)
        arguments += ["--min-workers", everyone, "--max-workers", everyone] if nodes.spares else []
    run_folder = Path(config.run.folder)
    return Request(job.stem, Path.cwd(), run_folder, tuple(arguments), nodes.count, nodes.spares)


@contextmanager
def _written(file: Path, text: str) -> Iterator[None]:
    """Write a file. If this or the `with` block fails, everything is as it was before."""
    before = file.read_bytes() if file.exists() else None
    missing = [path for path in (file, *file.parents) if not os.path.lexists(path)]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        yield
    except BaseException as error:
        if before is not None:
            file.write_bytes(before)
        elif missing:
            with suppress(OSError):
                file.unlink(missing_ok=True)
                for folder in missing[1:]:  # the innermost first
                    folder.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{file}: cannot be written ({error.strerror})") from None
        raise
