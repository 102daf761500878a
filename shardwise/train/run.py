"""A whole run on one worker: join a team, build, resume, step, evaluate, save, sample, and say what happened.

Every rank executes the same lines in the same order, because most of them communicate. Only the main rank
reports.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from shardwise.checkpoint.folder import resume_candidates
from shardwise.checkpoint.save import ResumeCheckpoint, Saved, SaveFailed
from shardwise.config import Config, to_toml
from shardwise.data import Dataset, check_vocabulary, with_data_settings
from shardwise.data.check_data import unnamed_tokenizer
from shardwise.drivers.driver import LooseWorker
from shardwise.drivers.registry import driver_of
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker, abandon, leave, peer_is_gone
from shardwise.observe import Ledger, StepTrace, present_time
from shardwise.plurals import counted
from shardwise.resilience.memory_snapshots import MemorySnapshots
from shardwise.resilience.team import Team
from shardwise.resilience.worker_link import WorkerLink
from shardwise.train.build import (
    Training,
    build,
    keep_copy,
    keep_files,
    recall,
    restore,
    save,
    start_from_pretrained,
    start_from_seed,
)
from shardwise.train.check_loss import check_summed_loss
from shardwise.train.evaluate import held_out_loss, sample
from shardwise.train.guard import check_joined
from shardwise.train.reporter import Beginning, Reporter, RunReporter, say_nothing_is_left
from shardwise.train.resume import resume_of
from shardwise.train.sources import Source
from shardwise.train.steps import Step, steps

log = logging.getLogger("shardwise")

LAST_SAVE_SECONDS = 60.0
"""How long a run that ends by a user's mistake waits for the save in flight."""
_present: list[Ledger] = []
"""Of the team this worker is in."""


def last_collective() -> str:
    """The last collective that this worker began, for whoever wonders why it does not go on."""
    return _present[0].last if _present else "none yet"


def run(config: Config, link: WorkerLink) -> int:
    """Train, in one team of workers after another, to the end or until asked to stop; returns the exit
    status."""
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice to the compiler's authors
    for problem in unnamed_tokenizer(
        config.data, config.model.pretrained
    ):  # where another launcher started this worker
        raise UserError(problem)
    dataset = Dataset.open(config.data, config.train.seed)
    check_vocabulary(dataset, config.model.vocabulary, config.model.pretrained)
    config = with_data_settings(
        config, dataset
    )  # here and not in `build` alone: a server's workers show it the job that they have
    copies = MemorySnapshots(config.recovery.copies if link.recovers else 0)
    loose_worker: LooseWorker | None = None
    while (joined := link.next_team()) is not None:
        worker, team = joined
        if worker.rank >= worker.world:  # it is no rank of the team, and computes for the ranks
            loose_worker = loose_worker or driver_of(config).loose_worker(config, worker, dataset)
            if loose_worker.work(worker, len(team.members), link):
                return 0
            continue
        loose_worker = None
        try:
            status = _in_team(config, worker, team, dataset, link, copies)
        except Exception as error:
            if not (link.recovers and peer_is_gone(error)):
                raise
            log.warning("a peer is gone: %s", error)
            link.peer_gone(str(error).splitlines()[0])
            status = None
            abandon()
        if status is not None:
            return status
        gc.collect()  # the team's model and buffers, which refer to each other
    return 0


def _in_team(
    config: Config, worker: Worker, team: Team, dataset: Dataset, link: WorkerLink, copies: MemorySnapshots
) -> int | None:
    """Train with these peers; None if the team parts before the end and another is to follow."""
    timestamps = {"joining": present_time()}
    link.progress("build", 0)
    training = build(
        config, team.plan, worker, dataset, draw=False
    )  # before it is known whether there is a checkpoint
    _present[:] = [training.comm.ledger]
    _check_same_job(training)
    timestamps["built"] = present_time()
    link.reads(training.rank_driver.rows(training))
    link.progress("restore", 0)
    chosen = _go_on(training, team, copies)
    check_joined(training)
    timestamps["restored"] = present_time()
    link.progress("step", training.step)
    status: int | None = 0
    if training.step < config.train.steps or team.generation > 1:
        status = _reported(training, Beginning(chosen, team, timestamps), link, copies)
    elif training.mesh.is_main:
        say_nothing_is_left(training, Path(config.run.folder))
    leave()  # not after a failure: peers may be stuck in a collective, and parting would wait for them
    return status


def _go_on(training: Training, team: Team, copies: MemorySnapshots) -> ResumeCheckpoint:
    """Put the newest state in place: from the workers' memories, or from storage; or begin."""
    config, checkpointer = training.config, training.checkpointer
    chosen = ResumeCheckpoint(None)
    if recall(training, copies):
        if training.mesh.is_main:
            keep_files(training, resume_candidates(resume_of(config)))
        return chosen
    if team.reached > 0:  # an earlier team of this run began as it was asked to; this one goes on
        chosen = checkpointer.choose_checkpoint(resume_of(_going_on(config)))
    if chosen.folder is None:
        chosen = checkpointer.choose_checkpoint(resume_of(config))
    if chosen.folder:
        restore(training, chosen.folder)
    elif config.model.pretrained is not None:
        start_from_pretrained(training, Path(config.model.pretrained))
    else:
        start_from_seed(training)
    if training.mesh.is_main:
        keep_files(training, [chosen.folder] if chosen.folder else [])
    return chosen


def _going_on(config: Config) -> Config:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def _reported(
    training: Training, beginning: Beginning, link: WorkerLink, copies: MemorySnapshots
) -> int | None:
    """The steps that are left, with a reporter that is closed however they end."""
    reporter = (
        RunReporter(training, Path(training.config.run.folder)) if training.mesh.is_main else Reporter()
    )
    with closing(reporter):
        reporter.start(beginning)
        try:
            if training.step == 0:
                check_summed_loss(training)
            with closing(training.rank_driver.source(training, link)) as source:
                return _loop(training, source, reporter, link, copies)
        except UserError as error:
            reporter.failed(str(error))
            training.checkpointer.finish(LAST_SAVE_SECONDS)
            raise
        except Exception as error:
            training.checkpointer.abandon()
            at = f"at step {training.step + 1}, with {training.rank_driver.rows(training)}"
            at = (
                at
                if training.step < training.config.train.steps
                else f"at the end, after step {training.step}"
            )
            error.add_note(f"rank {training.mesh.worker.rank} was {at}")
            raise


def _loop(
    training: Training, source: Source, reporter: Reporter, link: WorkerLink, copies: MemorySnapshots
) -> int | None:
    train, checkpoint = training.config.train, training.config.checkpoint
    saved_at, saved_time = training.step, time.monotonic()

    def save_due() -> bool:
        minutes = 0.0 if checkpoint.every else checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - saved_time >= 60 * minutes

    def stop_asked() -> bool:
        return link.wish() is not None

    for done in _traced(training, stop_asked, save_due, source):
        link.progress("step", training.step)
        _tell_of_waiting(training, link)
        keep_copy(training, copies)
        last = training.step == train.steps
        evaluate = not done.stop and (
            last or (train.evaluate_every and training.step % train.evaluate_every == 0)
        )
        if evaluate:
            link.progress("evaluate", training.step)
        loss = held_out_loss(training) if evaluate else None
        reporter.step(done, loss)
        if training.mesh.is_main:
            log.info("step %d: %.6f s, %s", done.step, done.seconds, done.spans)
        if last or done.stop or done.save or (checkpoint.every and training.step % checkpoint.every == 0):
            link.progress("save", training.step)  # it may wait for the one before
            save(training, wait=last or done.stop)
            saved_at, saved_time = training.step, time.monotonic()
        reporter.saves(outcomes := training.checkpointer.outcomes())
        check_saves(training, outcomes)
        if done.stop and not last:
            return _agree_on_end(training, reporter, link.stop_status())
        if evaluate or saved_at == training.step:  # their time and bytes are not the next step's
            training.comm.ledger.take()
            training.comm.clock.restart()
            link.progress("step", training.step)
            _tell_of_waiting(training, link)
    if training.step < train.steps:  # it was asked to stop while it waited for gradients
        if saved_at != training.step:
            save(training)
        training.checkpointer.finish(LAST_SAVE_SECONDS)
        reporter.saves(training.checkpointer.outcomes())
        return _agree_on_end(training, reporter, link.stop_status())
    assert saved_at == training.step, "a run ends with its last step saved"
    link.progress("end", training.step)
    reporter.end(_sampled(training, reporter))
    return 0


def _sampled(training: Training, reporter: Reporter) -> str | None:
    """What the model goes on with, if that was asked for. All is trained and saved: that it cannot be shown
    is no failure."""
    prompt = training.config.observe.sample
    try:
        return sample(training, prompt) if prompt else None
    except Exception as error:
        log.warning("no sample", exc_info=error)
        reporter.warn(
            f"all steps are done and saved, but there is no sample: {type(error).__name__}: {error}"
        )
        abandon()  # peers may wait for this rank in the sample
        return None


def check_saves(training: Training, outcomes: Sequence[Saved | SaveFailed]) -> None:
    """Stop a run that cannot save. The main rank does: it hears of every save, and whoever started the ranks
    ends the others."""
    failed, attempts = training.checkpointer.failed_in_a_row, training.config.checkpoint.attempts
    if training.mesh.is_main and outcomes and isinstance(outcomes[-1], SaveFailed) and 0 < attempts <= failed:
        raise RunFailed(
            f"{counted(failed, 'save')} in a row failed, so the run stops before more work is at risk "
            f"(checkpoint.attempts = {attempts}; 0: go on without). The last one: {outcomes[-1].message}"
        )


def _tell_of_waiting(training: Training, link: WorkerLink) -> None:
    """Tell the host that this rank may have to wait in the next step for ranks that are at another step: that
    is no hang."""
    if training.rank_driver.may_wait(training.step + 1):
        link.progress("meet", training.step)


def _agree_on_end(training: Training, reporter: Reporter, status: int | None) -> int | None:
    """All ranks stopped after the same step: the run ends, with this status, if any of them was asked to end
    it; None: they form another team.
    """
    status = max(training.peers.all_gather(status or 0)) or None
    reporter.stopped(status is not None)
    return status


def _traced(
    training: Training, stop_asked: Callable[[], bool], save_due: Callable[[], bool], source: Source
) -> Iterator[Step]:
    """The steps, with a trace of some after the first if asked for."""
    done_steps = steps(training, stop_asked, save_due, source)
    if not training.config.observe.trace:
        return done_steps
    return (
        _profiled(training, done_steps)
        if training.mesh.device.type == "cuda"
        else _timeline(training, done_steps)
    )


def _timeline(training: Training, done_steps: Iterator[Step]) -> Iterator[Step]:
    """On CPU workers clock and ledger know when everything happened."""
    trace, wanted = StepTrace(training.mesh.worker.rank), training.config.observe.trace
    for index, done in enumerate(done_steps):
        if 1 <= index <= wanted:
            trace.add(done.step, training.comm.clock.finished, training.comm.ledger.taken)
            if index == wanted or done.stop or done.step == training.config.train.steps:
                trace.write(Path(training.config.run.folder))
        yield done


def _profiled(training: Training, done_steps: Iterator[Step]) -> Iterator[Step]:
    """On GPUs torch's profiler knows it."""
    first = next(done_steps, None)
    if first is None:
        return
    yield first
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        done = list(islice(done_steps, 1))
        for _ in range(training.config.observe.trace - 1):
            yield from done
            done = list(islice(done_steps, 1))
    path = Path(training.config.run.folder) / f"profile-rank{training.mesh.worker.rank}.json"
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        log.warning("no trace of the steps after the first: %s", error)
    yield from done
    yield from done_steps


def _check_same_job(training: Training) -> None:
    """Workers that were started with different jobs would wait for each other forever; stop them now. What
    was decided must agree; reasons and predictions name this node's memory, and may differ in their last
    digits.
    """
    if training.mesh.worker.world == 1:
        return
    plan = training.plan.to_json()
    decided = [plan[name] for name in ("layout", "micro_batch", "accumulation", "recompute", "bucket_bytes")]
    job = json.dumps([to_toml(training.config, as_asked=True), decided]).encode()
    mine = hashlib.sha256(job).hexdigest()
    if training.peers.broadcast(mine, 0) != mine:
        raise UserError(
            f"rank {training.mesh.worker.rank} was started with another job than rank 0: "
            "give every node the same job file and overrides, and say layout.zero if the nodes' memory "
            "differs"
        )
