"""Reports of a run to the terminal and to the run folder. Only the main rank has a `RunReporter`; the
`Reporter` of the other ranks reports nothing."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import read_manifest, set_aside
from shardwise.checkpoint.save import ResumeCheckpoint, Saved, SaveFailed
from shardwise.checkpoint.storage import parent, same_folder
from shardwise.command_name import command_name
from shardwise.config import brings_data, to_toml
from shardwise.data import unigram_loss
from shardwise.mesh import device_name
from shardwise.observe import (
    EXPOSED,
    TrainingProgress,
    error_console,
    header,
    memory_kind,
    mfu,
    open_sinks,
    present_time,
    write_text,
)
from shardwise.plurals import counted
from shardwise.resilience.team import Team
from shardwise.train.build import Training
from shardwise.train.changes import changes
from shardwise.train.describe import describe_layout, describe_run, peak_of_device
from shardwise.train.resume import checkpoint_folder
from shardwise.train.steps import StepRecord

log = logging.getLogger("shardwise")


def say_nothing_is_left(training: Training, folder: Path) -> None:
    """Print that the checkpoint is already at the last step, without changing the run folder."""
    error_console().print(
        f"nothing to do: {folder} has reached step {training.step}, and train.steps is "
        f"{training.config.train.steps}. Raise "
        "train.steps to go on, use another run.folder, or start afresh with checkpoint.resume=never",
        markup=False,
        highlight=False,
    )


@dataclass(frozen=True)
class Beginning:
    """How a team began: with which checkpoint, if any, and when each part of its start was done."""

    chosen: ResumeCheckpoint
    team: Team
    timestamps: dict[str, float]

    @property
    def again(self) -> bool:
        """Whether this team continues the run of an earlier team."""
        return self.team.generation > 1


class Reporter:
    """The reporter of all ranks but the main one: it reports nothing."""

    def start(self, beginning: Beginning) -> None:
        """Report that the run begins, or continues with another team."""

    def step(self, done: StepRecord, held_out: float | None) -> None:
        """Report a step, and the held-out loss if it was evaluated after the step."""

    def saves(self, outcomes: Sequence[Saved | SaveFailed]) -> None:
        """Report checkpoints that were written, or could not be written."""

    def warn(self, text: str) -> None:
        """Report a problem that does not stop the run."""

    def logged(self, values: Mapping[str, float]) -> None:
        """Report numbers that a program recorded after the last step."""

    def failed(self, reason: str) -> None:
        """Report why the run cannot continue."""

    def stopped(self, stop: bool) -> None:
        """Report that the run has saved and stops or, if not `stop`, continues with another team."""

    def end(self, text: str | None) -> None:
        """Report that all steps are done, and print a sample of text."""

    def close(self) -> None:
        """Close all files, however the run ended."""


class RunReporter(Reporter):
    """The reporter of the main rank, which writes to the run folder and the terminal."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.console = error_console()
        self.progress = TrainingProgress(self.console, training.config.train.steps, training.step + 1)
        write_text(folder / "config.toml", to_toml(training.config, as_asked=True), self.warn)
        write_text(folder / "plan.json", json.dumps(training.plan.to_json(), indent=1) + "\n", self.warn)
        if training.plan.unpredicted:
            log.warning("no prediction for this run: %s", training.plan.unpredicted)
        callbacks = () if training.program is None else training.program.callbacks
        self.sinks = open_sinks(folder, training.config.observe, training.step, self.warn, callbacks)
        self.peak = peak_of_device(training)
        self.held_out: float | None = None
        self.first = True

    def warn(self, text: str) -> None:
        """Print a warning above the progress line."""
        self.progress.message(f"warning: {text}")

    def start(self, beginning: Beginning) -> None:
        """Print the header of the run and write the first events."""
        training, resumed_from = self.training, beginning.chosen.folder
        self.beginning = beginning
        began = (
            {} if beginning.again else {"start_up_seconds": max(0.0, present_time() - beginning.team.formed)}
        )
        if not beginning.again:
            header(self.console, f"shardwise train, into {self.folder}", describe_run(training))
        for skipped, reason in beginning.chosen.skipped:
            self.sinks.event("skip_checkpoint", checkpoint=skipped, reason=reason)
            self.progress.message(f"warning: skipped {skipped}: {reason.partition('. Remove ')[0]}")
        folder = checkpoint_folder(training.config)
        ours = beginning.again or (resumed_from is not None and same_folder(parent(resumed_from), folder))
        if moved := set_aside(folder, after=training.step if ours else -1):
            self.progress.message(
                f"checkpoints later than step {training.step}, which this run does again, are now in {moved}"
            )
        if resumed_from:
            self.sinks.event(
                "resume", step=training.step, checkpoint=resumed_from, **self._machine(), **began
            )
            self.progress.message(f"resumed from {resumed_from}")
            for change in changes(read_manifest(resumed_from), training.config):
                self.progress.message(f"note: {change}")
        elif training.step:
            self.sinks.event("resume", step=training.step, checkpoint=None, **self._machine())
            self.progress.message("resumed from the copies in the workers' memories")
        else:
            self.sinks.event("start", **self._machine(), **began)
            if training.config.model.pretrained:
                self.progress.message(f"starts from the weights in {training.config.model.pretrained}")
        if beginning.again:
            self._say_team(beginning.team)

    def _say_team(self, team: Team) -> None:
        why = f"{team.fault.cause}. " if team.fault else ""
        workers = f"{counted(len(team.members), 'worker')}, {describe_layout(self.training)}"
        self.progress.message(f"{why}Going on from step {self.training.step} with {workers}")

    def _recovered(self) -> None:
        """Report what a fault cost, and how long each part of the recovery took. Called after the first step
        that follows the fault."""
        team, timestamps = self.beginning.team, self.beginning.timestamps
        if team.fault is None:
            return
        now, fault = present_time(), team.fault
        lost, lost_seconds = len(self.sinks.dropped), sum(self.sinks.dropped)
        parts = {
            "detect": team.formed - fault.at,
            "restart": timestamps["joining"] - team.formed,
            "build": timestamps["built"] - timestamps["joining"],
            "restore": timestamps["restored"] - timestamps["built"],
            "first_step": now - timestamps["restored"],
        }
        self.sinks.event(
            "recovery",
            step=self.training.step - 1,
            lost_steps=lost,
            lost_seconds=lost_seconds,
            seconds=now - fault.at,
            parts=parts,
            generation=team.generation,
            world=len(team.members),
        )
        self.progress.message(
            f"recovered in {now - fault.at:.1f} s; {counted(lost, 'step')} ({lost_seconds:.1f} s) to do again"
        )

    def _machine(self) -> dict[str, Any]:
        mesh = self.training.mesh
        return {
            "world": mesh.worker.world,
            "device": device_name(mesh.device),
            "memory_kind": memory_kind(mesh.device.type),
            "layout": self.training.plan.layout.model_dump(),
        }

    def step(self, done: StepRecord, held_out: float | None) -> None:
        """Write the record of a step and show the progress."""
        if self.first:
            self.first = False
            self._recovered()
        record = self._record(done)
        if held_out is not None:
            record["held_out_loss"] = self.held_out = held_out
            self.sinks.event(
                "evaluate", step=done.step, held_out_loss=held_out, seconds=present_time() - done.ended
            )
        self.sinks.metrics(record)
        self.progress.update(record)
        if held_out is not None:
            self.progress.message(f"step {done.step}: held-out loss {held_out:.4f}")
            if not math.isfinite(held_out):
                self.warn(
                    f"the held-out loss is {held_out}, though the loss of every training step is finite: "
                    f"some held-out "
                    "sequences have a loss that is not (held-out data, or what a module of your own computes "
                    "in eval mode)"
                )
        if done.skipped:
            self.sinks.event("skip", step=done.step, reason="float16 overflow", loss_scale=done.loss_scale)
            self.progress.message(
                f"step {done.step}: float16 overflow, step skipped, scale {done.loss_scale:g} halved"
            )
        self._stragglers(done)

    def _stragglers(self, done: StepRecord) -> None:
        """Report ranks that began or ceased to delay the others."""
        team = self.beginning.team
        for straggler in done.stragglers.named:
            self.sinks.event(
                "straggler",
                rank=straggler.rank,
                factor=straggler.factor,
                cause=straggler.cause,
                step=straggler.since_step,
            )
            several = len({member.host for member in team.members}) > 1
            host = (
                f"; it is on host {team.members[straggler.rank].host}"
                if several and straggler.rank is not None
                else ""
            )
            self.progress.message(f"{straggler}{host}")
        for straggler in done.stragglers.gone:
            self.sinks.event("straggler_gone", rank=straggler.rank, cause=straggler.cause, step=done.step)
            who = "the time between ranks" if straggler.rank is None else f"rank {straggler.rank}"
            self.progress.message(f"step {done.step}: {who} is as usual again")

    def _record(self, done: StepRecord) -> dict[str, Any]:
        training, config = self.training, self.training.config
        # All tokens that were computed, with or without a loss.
        speed = config.train.global_batch * config.data.sequence_length / done.seconds
        of_samples = brings_data(config)  # which are no tokens
        world = training.mesh.worker.world
        efficiency = 1 - done.spans[EXPOSED] / done.seconds if EXPOSED in done.spans else None
        return {
            "step": done.step,
            "time": done.ended,
            "loss": done.loss,
            "gradient_norm": done.gradient_norm,
            "learning_rate": done.learning_rate,
            "tokens": done.tokens,
            "tokens_per_second": None if of_samples else speed,
            "sequences_per_second": config.train.global_batch / done.seconds,
            "seconds": done.seconds,
            "mfu": None if of_samples else mfu(speed, training.plan.flops_per_token, world, self.peak),
            "memory_bytes": done.memory_bytes,
            "spans": done.spans,
            "data": done.data,
            "collectives": done.collectives,
            **({"communication": done.communication} if done.communication else {}),
            "communication_efficiency": efficiency,
            **_asynchronous_record(done),
            **({"loss_scale": done.loss_scale} if training.scale.dynamic else {}),
            **({"skipped": True} if done.skipped else {}),
            **({"float8": done.float8, "again": done.again} if done.float8 else {}),
            **_expert_record(done),
            **_program_record(done),
        }

    def logged(self, values: Mapping[str, float]) -> None:
        """Write an event with numbers that a program recorded after the last step."""
        if values:
            self.sinks.event("log", step=self.training.step, **values)

    def saves(self, outcomes: Sequence[Saved | SaveFailed]) -> None:
        """Write an event and a message for each save."""
        for outcome in outcomes:
            if isinstance(outcome, SaveFailed):
                self.sinks.event("save_failed", step=outcome.step, reason=outcome.message)
                self.progress.message(
                    f"warning: {outcome.message}. Training goes on; older checkpoints are as they were"
                )
                continue
            costs = {name: getattr(outcome, name) for name in ("seconds", "stall_seconds", "bytes")}
            self.sinks.event("save", step=outcome.step, checkpoint=outcome.folder, **costs)
            self.progress.message(f"saved {outcome.folder}")

    def failed(self, reason: str) -> None:
        """Write an event with the reason of the failure."""
        self.sinks.event("failure", step=self.training.step, reason=reason)

    def stopped(self, stop: bool) -> None:
        """Write an event, and print how to continue the run."""
        if not stop:
            self.sinks.event("regroup", step=self.training.step)
            return self.progress.message(f"the number of workers changes after step {self.training.step}")
        self.sinks.event("stop", step=self.training.step)
        again = (
            "the same command"
            if self.training.config.checkpoint.resume == "auto"
            else "it again with checkpoint.resume=auto"
        )
        return self.progress.message(
            f"stopped after step {self.training.step}; run {again} to go on from there"
        )

    def end(self, text: str | None) -> None:
        """Print the last loss beside that of a unigram model, and the sample."""
        self.progress.close()
        self.sinks.event("end", step=self.training.step)
        if self.held_out is not None:
            self._compare_with_unigram(self.held_out)
        if text is not None:
            self.console.rule("a sample")
            self.console.print(text, markup=False, highlight=False)
            self.console.rule()
        self.console.print(f"next: {command_name()} report {self.folder}", markup=False, highlight=False)

    def _compare_with_unigram(self, held_out: float) -> None:
        if self.training.parallel.counts_items:
            return self.console.print(f"held-out loss {held_out:.4f} for each item that the module counts")
        try:
            unigram = unigram_loss(self.training.text)
        except Exception as error:  # the run is complete
            return self.warn(
                f"held-out loss {held_out:.4f} nats a token; nothing to compare it with: {error}"
            )
        return self.console.print(
            f"held-out loss {held_out:.4f} nats a token; a unigram model reaches {unigram:.4f}"
        )

    def close(self) -> None:
        """Close the progress line and the files of the run folder."""
        self.progress.close()
        self.sinks.close()


def _asynchronous_record(done: StepRecord) -> dict[str, Any]:
    """Return the optional entries of a step's record: stragglers, uneven rows, staleness, and lock-free
    updates."""
    late = done.stragglers
    return {
        **({"latest": {"rank": late.latest, "behind": late.behind}} if late.latest is not None else {}),
        **({"load_imbalance": done.load_imbalance} if done.load_imbalance is not None else {}),
        **({"rows": done.rows} if done.rows else {}),
        **({"staleness": done.staleness} if done.staleness else {}),
        **({"dropped": done.dropped} if done.dropped else {}),
        **({"updates": asdict(done.updates)} if done.updates else {}),
    }


def _expert_record(done: StepRecord) -> dict[str, Any]:
    if not done.expert_load:
        return {}
    return {"expert_imbalance": done.expert_imbalance, "expert_load": done.expert_load}


def _program_record(done: StepRecord) -> dict[str, Any]:
    """Return the losses of a program by name, if there are several, and what it recorded."""
    losses = {name: value for name, value in done.losses.items() if name != "items"}
    return {
        **({"items": done.losses["items"]} if losses else {}),
        **({"losses": losses} if len(losses) > 1 else {}),
        **({"logged": done.logged} if done.logged else {}),
    }
