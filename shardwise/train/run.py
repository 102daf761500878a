"""A whole run on one worker: build, resume, step, evaluate, save, sample, and say what happened.

Every rank executes the same lines in the same order, because most of them communicate. Only the main rank speaks.
"""

from __future__ import annotations

import json
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardwise.checkpoint import set_aside, to_resume
from shardwise.comm import EXPOSED
from shardwise.config import Config, to_toml
from shardwise.data import Dataset, check_vocabulary, unigram_loss
from shardwise.errors import UserError
from shardwise.mesh import Worker, device_memory, device_name, leave
from shardwise.observe import TrainingProgress, error_console, header, memory_kind, mfu, open_sinks, peak_flops
from shardwise.plan import choose
from shardwise.train.build import Training, build, restore, save
from shardwise.train.evaluate import held_out_loss, sample
from shardwise.train.facts import facts
from shardwise.train.steps import Step, steps

log = logging.getLogger("shardwise")
INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM: the state is saved, and the same command goes on from it."""


def run(config: Config, worker: Worker) -> int:
    """Train, as this worker, to the end or until asked to stop; returns the exit status."""
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice to the compiler's authors
    dataset = Dataset.open(config.data, config.train.seed)
    check_vocabulary(dataset, config.model.vocabulary)
    plan = choose(config, worker.world, device_memory(worker.local_world))
    folder = Path(config.run.folder)
    with ExitStack() as stack:
        stop_asked = stack.enter_context(_signals())
        stack.callback(leave)
        training = build(config, plan, worker, dataset)
        _check_same_job(training)
        resumed_from = to_resume(config)
        if resumed_from:
            restore(training, resumed_from)
        voice = _Voice(training, folder) if training.mesh.is_main else _Silence()
        stack.callback(voice.close)
        voice.start(resumed_from)
        if training.step >= config.train.steps:
            voice.nothing_to_do()
            return 0
        return _loop(training, voice, stop_asked)


def _loop(training: Training, voice: _Silence, stop_asked: Callable[[], bool]) -> int:
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
    mine = json.dumps([to_toml(training.config), training.plan.to_json()])
    first: list[Any] = [mine]
    dist.broadcast_object_list(first, src=0)
    if first[0] != mine:
        raise UserError(
            f"rank {training.mesh.worker.rank} was started with another job than rank 0: "
            "give every node the same job file, overrides and shardwise version"
        )


class _Silence:
    """What every rank but the main one has to say."""

    def start(self, resumed_from: Path | None) -> None:
        """The run begins."""

    def step(self, done: Step, held_out: float | None) -> None:
        """A step is done, and perhaps an evaluation after it."""

    def saved(self, path: Path) -> None:
        """A checkpoint is in place."""

    def nothing_to_do(self) -> None:
        """The checkpoint is at the last step already."""

    def stopped(self) -> None:
        """The run was asked to stop, and has saved."""

    def end(self, text: str | None) -> None:
        """All steps are done."""

    def close(self) -> None:
        """Nothing more will be said, whether the run ended well or not."""


class _Voice(_Silence):
    """The main rank's: the run folder and the terminal."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.console = error_console()
        self.sinks = open_sinks(folder, training.config.observe, training.step)
        self.progress = TrainingProgress(self.console, training.config.train.steps, training.step + 1)
        self.peak = peak_flops(device_name(training.mesh.device), training.config.train.precision)
        self.held_out: float | None = None

    def start(self, resumed_from: Path | None) -> None:
        training = self.training
        (self.folder / "config.toml").write_text(to_toml(training.config))
        (self.folder / "plan.json").write_text(json.dumps(training.plan.to_json(), indent=1) + "\n")
        header(self.console, f"shardwise train, into {self.folder}", facts(training))
        if resumed_from:
            self.sinks.event("resume", step=training.step, checkpoint=str(resumed_from), **self._machine())
            self.progress.message(f"resumed from {resumed_from}")
        else:
            if moved := set_aside(self.folder):
                self.progress.message(f"a fresh start: earlier checkpoints are now in {moved}")
            self.sinks.event("start", **self._machine())

    def _machine(self) -> dict[str, Any]:
        mesh = self.training.mesh
        return {
            "world": mesh.worker.world,
            "device": device_name(mesh.device),
            "memory_kind": memory_kind(mesh.device.type),
            "layout": self.training.plan.layout.model_dump(),
        }

    def step(self, done: Step, held_out: float | None) -> None:
        record = self._record(done)
        if held_out is not None:
            record["held_out_loss"] = self.held_out = held_out
            self.sinks.event("evaluate", step=done.step, held_out_loss=held_out)
        self.sinks.metrics(record)
        self.progress.update(record)
        if held_out is not None:
            self.progress.message(f"step {done.step}: held-out loss {held_out:.4f}")
        if done.skipped:
            self.sinks.event("skip", step=done.step, reason="float16 overflow", loss_scale=done.loss_scale)
            self.progress.message(f"step {done.step}: float16 overflow, step skipped, scale {done.loss_scale:g} halved")

    def _record(self, done: Step) -> dict[str, Any]:
        training = self.training
        speed = done.tokens / done.seconds
        return {
            "step": done.step,
            "time": time.time(),
            "loss": done.loss,
            "gradient_norm": done.gradient_norm,
            "learning_rate": done.learning_rate,
            "tokens": done.tokens,
            "tokens_per_second": speed,
            "sequences_per_second": training.config.train.global_batch / done.seconds,
            "seconds": done.seconds,
            "mfu": mfu(speed, training.plan.flops_per_token, training.mesh.worker.world, self.peak),
            "memory_bytes": done.memory_bytes,
            "spans": done.spans,
            "collectives": done.collectives,
            "communication_efficiency": 1 - done.spans[EXPOSED] / done.seconds if EXPOSED in done.spans else None,
            **({"loss_scale": done.loss_scale} if training.scale.dynamic else {}),
            **({"skipped": True} if done.skipped else {}),
        }

    def saved(self, path: Path) -> None:
        self.sinks.event("save", step=self.training.step, checkpoint=str(path))
        self.progress.message(f"saved {path}")

    def nothing_to_do(self) -> None:
        done, asked = self.training.step, self.training.config.train.steps
        self.progress.message(
            f"nothing to do: {self.folder} has reached step {done}, and train.steps is {asked}. Raise train.steps to go on, "
            "use another run.folder, or start afresh with checkpoint.resume=never"
        )

    def stopped(self) -> None:
        self.sinks.event("stop", step=self.training.step)
        self.progress.message(f"stopped after step {self.training.step}; run the same command again to go on from there")

    def end(self, text: str | None) -> None:
        self.progress.close()
        self.sinks.event("end", step=self.training.step)
        if self.held_out is not None:
            unigram = unigram_loss(self.training.dataset)
            self.console.print(f"held-out loss {self.held_out:.4f} nats a token; a unigram model reaches {unigram:.4f}")
        if text is not None:
            self.console.rule("a sample")
            self.console.print(text, markup=False, highlight=False)
            self.console.rule()
        self.console.print(f"next: shardwise report {self.folder}", markup=False, highlight=False)

    def close(self) -> None:
        self.progress.close()
        self.sinks.close()
