"""What a run says of itself: to the terminal, and to the run folder. Only the main rank has a voice."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Manifest, read_manifest, set_aside
from shardwise.comm import EXPOSED
from shardwise.config import Config, to_toml
from shardwise.data import unigram_loss
from shardwise.mesh import device_name
from shardwise.observe import TrainingProgress, error_console, header, memory_kind, mfu, open_sinks, peak_flops
from shardwise.train.build import Training
from shardwise.train.facts import facts
from shardwise.train.steps import Step


def changed_data(manifest: Manifest, config: Config) -> list[str]:
    """What differs from the checkpoint among the settings that decide which sequences a step sees."""
    keys = [("train", key) for key in ("seed", "global_batch")]
    keys += [("data", key) for key in ("source", "sources", "tokenizer", "text_field", "sequence_length", "held_out")]
    asked = config.model_dump(mode="json")
    pairs = [(f"{section}.{key}", getattr(manifest, section).get(key), asked[section][key]) for section, key in keys]
    return [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]


def say_nothing_is_left(training: Training, folder: Path) -> None:
    """The checkpoint is at the last step already: say so, and touch nothing in the run folder."""
    error_console().print(
        f"nothing to do: {folder} has reached step {training.step}, and train.steps is {training.config.train.steps}. Raise "
        "train.steps to go on, use another run.folder, or start afresh with checkpoint.resume=never",
        markup=False,
        highlight=False,
    )


class Silence:
    """What every rank but the main one has to say."""

    def start(self, resumed_from: Path | None) -> None:
        """The run begins."""

    def step(self, done: Step, held_out: float | None) -> None:
        """A step is done, and perhaps an evaluation after it."""

    def saved(self, path: Path) -> None:
        """A checkpoint is in place."""

    def failed(self, reason: str) -> None:
        """The run cannot go on."""

    def stopped(self) -> None:
        """The run was asked to stop, and has saved."""

    def end(self, text: str | None) -> None:
        """All steps are done."""

    def close(self) -> None:
        """Nothing more will be said, whether the run ended well or not."""


class Voice(Silence):
    """The main rank's: the run folder and the terminal."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.console = error_console()
        (folder / "config.toml").write_text(to_toml(training.config))
        (folder / "plan.json").write_text(json.dumps(training.plan.to_json(), indent=1) + "\n")
        self.sinks = open_sinks(folder, training.config.observe, training.step)
        self.progress = TrainingProgress(self.console, training.config.train.steps, training.step + 1)
        self.peak = peak_flops(device_name(training.mesh.device), training.config.train.precision)
        self.held_out: float | None = None

    def start(self, resumed_from: Path | None) -> None:
        training = self.training
        header(self.console, f"shardwise train, into {self.folder}", facts(training))
        ours = resumed_from is not None and resumed_from.parent.resolve() == (self.folder / "checkpoints").resolve()
        if moved := set_aside(self.folder, after=training.step if ours else -1):
            self.progress.message(f"checkpoints of an earlier run, later than step {training.step}, are now in {moved}")
        if resumed_from:
            self.sinks.event("resume", step=training.step, checkpoint=str(resumed_from), **self._machine())
            self.progress.message(f"resumed from {resumed_from}")
            for change in changed_data(read_manifest(resumed_from), training.config):
                self.progress.message(f"note: {change}, so the data goes on in another order than the run began with")
        else:
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
            **({"expert_imbalance": done.expert_imbalance, "expert_load": done.expert_load} if done.expert_load else {}),
        }

    def saved(self, path: Path) -> None:
        self.sinks.event("save", step=self.training.step, checkpoint=str(path))
        self.progress.message(f"saved {path}")

    def failed(self, reason: str) -> None:
        self.sinks.event("failure", step=self.training.step, reason=reason)

    def stopped(self) -> None:
        self.sinks.event("stop", step=self.training.step)
        again = "the same command" if self.training.config.checkpoint.resume == "auto" else "it again with checkpoint.resume=auto"
        self.progress.message(f"stopped after step {self.training.step}; run {again} to go on from there")

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
