"""A whole run on one worker: build, resume, step, evaluate, save, sample, and say what happened.

Every rank executes the same lines in the same order, because most of them communicate. Only the main rank speaks.
"""

from __future__ import annotations

import json
import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardwise.checkpoint import to_resume
from shardwise.config import Config, to_toml
from shardwise.data import Dataset, check_vocabulary
from shardwise.errors import UserError
from shardwise.mesh import Worker, device_memory, leave
from shardwise.parallel import count_parameters
from shardwise.plan import choose
from shardwise.train.build import Training, build, restore, save
from shardwise.train.evaluate import held_out_loss, sample
from shardwise.train.launch import INTERRUPTED
from shardwise.train.steps import Step, steps
from shardwise.train.voice import Silence, Voice, say_nothing_is_left

log = logging.getLogger("shardwise")


def run(config: Config, worker: Worker) -> int:
    """Train, as this worker, to the end or until asked to stop; returns the exit status."""
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice to the compiler's authors
    dataset = Dataset.open(config.data, config.train.seed)
    check_vocabulary(dataset, config.model.vocabulary)
    plan = choose(config, worker.world, device_memory(worker.local_world), count_parameters(config))
    folder = Path(config.run.folder)
    with _signals() as stop_asked:
        training = build(config, plan, worker, dataset)
        _check_same_job(training)
        resumed_from = to_resume(config)
        if resumed_from:
            restore(training, resumed_from)
        status = 0
        if training.step < config.train.steps:
            status = _speaking(training, folder, resumed_from, stop_asked)
        elif training.mesh.is_main:
            say_nothing_is_left(training, folder)
        leave()  # not after a failure: peers may be stuck in a collective, and parting would wait for them
        return status


def _speaking(training: Training, folder: Path, resumed_from: Path | None, stop_asked: Callable[[], bool]) -> int:
    """The steps that are left, with a voice that is closed however they end."""
    voice = Voice(training, folder) if training.mesh.is_main else Silence()
    with closing(voice):
        voice.start(resumed_from)
        try:
            return _loop(training, voice, stop_asked)
        except UserError as error:
            voice.failed(str(error))
            raise


def _loop(training: Training, voice: Silence, stop_asked: Callable[[], bool]) -> int:
    train, every = training.config.train, training.config.checkpoint.every
    saved_at = training.step
    for done in _traced(training, stop_asked):
        last = training.step == train.steps
        evaluate = not done.stop and (last or (train.evaluate_every and training.step % train.evaluate_every == 0))
        loss = held_out_loss(training) if evaluate else None
        voice.step(done, loss)
        log.info("step %d: %.6f s, %s", done.step, done.seconds, done.spans)
        if last or done.stop or (every and training.step % every == 0):
            voice.saved(save(training))
            saved_at = training.step
        if done.stop and not last:
            voice.stopped()
            return INTERRUPTED
        if evaluate or saved_at == training.step:  # their time and traffic are not the next step's
            training.traffic.ledger.take()
            training.traffic.clock.restart()
    assert saved_at == training.step, "a run ends with its last step saved"
    prompt = training.config.observe.sample
    voice.end(sample(training, prompt) if prompt else None)
    return 0


def _traced(training: Training, stop_asked: Callable[[], bool]) -> Iterator[Step]:
    """The steps, one of them under torch's profiler if asked for."""
    wanted, generator = training.config.observe.trace, steps(training, stop_asked)
    while True:
        if wanted and training.step + 1 == wanted:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            with profile(activities=activities) as profiler:
                done = next(generator, None)
            folder = Path(training.config.run.folder) / "trace"
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"step-{wanted}-rank-{training.mesh.worker.rank}.json"))
        else:
            done = next(generator, None)
        if done is None:
            return
        yield done


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question the loop can ask; a second one ends the process at once."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_same_job(training: Training) -> None:
    """Workers that were started with different jobs would wait for each other forever; stop them now."""
    if training.mesh.worker.world == 1:
        return
    mine = json.dumps([to_toml(training.config), training.plan.layout.model_dump()])
    first: list[Any] = [mine]
    dist.broadcast_object_list(first, src=0)
    if first[0] != mine:
        raise UserError(
            f"rank {training.mesh.worker.rank} was started with another job than rank 0: "
            "give every node the same job file and overrides, and say layout.zero if the nodes' memory differs"
        )
