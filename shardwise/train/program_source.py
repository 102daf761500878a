"""Where the gradients of a program come from: the user's function is loaded, called with an engine, and run
by turns with the training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config import Config
from shardwise.config.module_file import PICKLED
from shardwise.data.random_numbers import generators_restored, seed_process
from shardwise.errors import UserError
from shardwise.resilience.user_code import trace_of_user_code
from shardwise.train.engine import Engine
from shardwise.train.program import Program
from shardwise.user_file import load_file, locate

if TYPE_CHECKING:
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.record import StepRecord
    from shardwise.train.step_gradients import StepGradients

EXAMPLE = "train.py:program"


def make_program(config: Config) -> Program:
    """Return the program of a job, which has not begun. Generators are seeded first, for what the program's
    file draws at its top."""
    assert config.run.program is not None, "the job has a program"
    seed_process(config.train.seed)
    function = load_program(config.run.program)
    return Program(config, lambda program: function(Engine(program)))


def described(config: Config) -> Config:
    """Return the job with what its program asks for; the job itself if it has no program. This runs the
    program up to its first batch, in the process of the user, whose random numbers stay as they were."""
    try:
        with generators_restored(gpus=True), begun(config) as program:
            return config if program is None else program.asked.filled()
    except UserError:
        raise
    except Exception as error:
        told = trace_of_user_code(error).rstrip()
        raise UserError(
            f"{config.run.program}: the program failed before its first batch:\n{told}"
        ) from error


@contextmanager
def begun(config: Config) -> Iterator[Program | None]:
    """Run the program of a job up to its first batch, and end it afterwards where it waits. Yield None if the
    job has no program."""
    program = None if config.run.program is None else make_program(config)
    try:
        if program is not None:
            program.begin()
        yield program
    finally:
        if program is not None:
            program.leave()


def load_program(address: str) -> Callable[[Engine], object]:
    """Return the function that "file.py:function" names."""
    where = f"run.program = {address!r}"
    if address.endswith(PICKLED):
        return _unpickled(where, Path(address))
    path, name = locate(where, address, EXAMPLE)
    try:
        loaded = load_file(path)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {path.name} could not be run: {type(error).__name__}: {error}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        raise UserError(f"{where}: {path.name} has no function {name}")
    return function  # type: ignore[no-any-return]


def _unpickled(where: str, path: Path) -> Callable[[Engine], object]:
    """Return the function that `shardwise.launch` wrote to a file on this machine."""
    import cloudpickle

    try:
        with path.open("rb") as file:
            is_own = os.fstat(file.fileno()).st_uid == os.getuid()
            function: Callable[[Engine], object] | None = cloudpickle.load(file) if is_own else None
    except Exception as error:
        raise UserError(
            f"{where}: cannot be read: {error}; call shardwise.launch with the program again"
        ) from error
    if function is None:
        raise UserError(f"{where}: the file is of another user, and reading it would run their code")
    return function


class ProgramSource:
    """The source of a run with a program: the program computes the gradients."""

    def __init__(self, training: Training, program: Program, link: WorkerLink | None) -> None:
        self._program, self._again, program.link = program, False, link
        program.bind(training)

    def compute_gradients(self) -> StepGradients:
        """Let the program compute the gradients of the next step."""
        if self._again:
            self._again = False
            return self._program.gradients_again()
        return self._program.next_gradients()

    def prepare_next(self) -> None:
        """Read the next batch while the device works."""
        self._program.read_ahead()

    def repeat_last(self) -> None:
        """Compute the next gradients as the last ones."""
        self._again = True

    def step_done(self, done: StepRecord) -> Mapping[str, float]:
        """Let the program do what follows the step."""
        return self._program.after_step(done)

    def finish(self) -> None:
        """Let the program run to its end."""
        self._program.finish()

    def close(self) -> None:
        """End the program where it waits, and its thread."""
        self._program.leave()
