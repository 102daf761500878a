"""A whole run on one worker: join a team, build, resume, train, evaluate, save, sample, and report.

Most of these parts communicate, so all ranks must execute them in the same order. Only the main rank reports.
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
from shardwise.config import Config, brings_data, to_toml
from shardwise.data import Dataset, check_vocabulary, with_data_settings
from shardwise.data.check_data import unnamed_tokenizer
from shardwise.drivers.driver import LooseWorker
from shardwise.drivers.registry import driver_of
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker, abandon, leave, nccl, peer_is_gone
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
from shardwise.train.program import Program
from shardwise.train.program_source import begun
from shardwise.train.reporter import Beginning, Reporter, RunReporter, say_nothing_is_left
from shardwise.train.resume import resume_of
from shardwise.train.sources import Source
from shardwise.train.steps import StepRecord, steps

log = logging.getLogger("shardwise")

LAST_SAVE_SECONDS = 60.0
"""Seconds that a run waits for a background save when it ends because of a user's mistake or a request to
stop."""
_present: list[Ledger] = []
"""The ledger of this worker's present team; empty before the first team."""


def last_collective() -> str:
    """Return the last collective that this worker began, which shows where it hangs."""
    return _present[0].last if _present else "none yet"


def run(config: Config, link: WorkerLink) -> int:
    """Train in one team of workers after another, to the end or until asked to stop, and return the exit
    status."""
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice to the compiler's authors
    for problem in unnamed_tokenizer(config.data, config.model.pretrained):
        raise UserError(problem)  # only under another launcher: shardwise's own has checked this before
    dataset = None
    if not brings_data(config):
        dataset = Dataset.open(config.data, config.train.seed)
        check_vocabulary(dataset, config.model.vocabulary, config.model.pretrained)
        # `build` does this too. Here it is for the workers of a parameter server, whose job is compared.
        config = with_data_settings(config, dataset)
    copies = MemorySnapshots(config.recovery.copies if link.recovers else 0)
    loose_worker: LooseWorker | None = None
    while (joined := link.next_team()) is not None:
        worker, team = joined
        if worker.rank >= worker.world:  # a loose worker: not a rank of the team
            assert dataset is not None, "a program has no workers that are not ranks"
            loose_worker = loose_worker or driver_of(config).loose_worker(config, worker, dataset)
            if loose_worker.work(worker, len(team.members), link):
                return 0
            continue
        loose_worker = None
        try:
            status = _in_team(config, worker, team, dataset, link, copies)
        except Exception as error:
            if not (link.recovers and (nccl.is_interrupted() or peer_is_gone(error))):
                raise
            log.warning("a peer is gone: %s", error)
            link.peer_gone(str(error).splitlines()[0])
            status = None
            abandon()
        if status is not None:
            return status
        gc.collect()  # frees the team's model and buffers, which refer to each other
    return 0


def _in_team(
    config: Config,
    worker: Worker,
    team: Team,
    dataset: Dataset | None,
    link: WorkerLink,
    copies: MemorySnapshots,
) -> int | None:
    """Train in this team and return the exit status; None: another team will follow."""
    with begun(config) as program:
        return _train_in_team(config, worker, team, dataset, link, copies, program)


def _train_in_team(
    config: Config,
    worker: Worker,
    team: Team,
    dataset: Dataset | None,
    link: WorkerLink,
    copies: MemorySnapshots,
    program: Program | None,
) -> int | None:
    timestamps = {"joining": present_time()}
    link.progress("build", 0)
    data = dataset if program is None else program.asked.samples or dataset
    # There may be a checkpoint, so no weights are drawn.
    training = build(config, team.plan, worker, data, draw=False, program=program)
    _present[:] = [training.comm.ledger]
    _check_same_job(training)
    timestamps["built"] = present_time()
    link.reads(training.rank_driver.rows(training))
    link.progress("restore", 0)
    chosen = _restore_or_start(training, team, copies)
    check_joined(training)
    timestamps["restored"] = present_time()
    link.progress("step", training.step)
    status: int | None = 0
    if training.step < config.train.steps or team.generation > 1:
        status = _reported(training, Beginning(chosen, team, timestamps), link, copies)
    elif training.mesh.is_main:
        say_nothing_is_left(training, Path(config.run.folder))
    leave()  # not after a failure, because leaving would wait for ranks that are stuck in a collective
    return status


def _restore_or_start(training: Training, team: Team, copies: MemorySnapshots) -> ResumeCheckpoint:
    """Restore the newest state from the workers' memories or from storage, or start with initial weights."""
    config, checkpointer = training.config, training.checkpointer
    chosen = ResumeCheckpoint(None)
    if recall(training, copies):
        if training.mesh.is_main:
            keep_files(training, resume_candidates(resume_of(config)))
        return chosen
    if team.reached > 0:  # an earlier team applied `checkpoint.resume`; this team continues its run
        chosen = checkpointer.choose_checkpoint(resume_of(_with_auto_resume(config)))
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


def _with_auto_resume(config: Config) -> Config:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def _reported(
    training: Training, beginning: Beginning, link: WorkerLink, copies: MemorySnapshots
) -> int | None:
    """Run the remaining steps with a reporter, and close it in every case."""
    folder = Path(training.config.run.folder)
    reporter = RunReporter(training, folder) if training.mesh.is_main else Reporter()
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
            at = f"at the end, after step {training.step}"
            if training.step < training.config.train.steps:
                at = f"at step {training.step + 1}, with {training.rank_driver.rows(training)}"
            error.add_note(f"rank {training.mesh.worker.rank} was {at}")
            raise


class _SaveSchedule:
    """Tells when a checkpoint is due, by steps or by minutes since the last one."""

    def __init__(self, training: Training) -> None:
        self._training, self._checkpoint = training, training.config.checkpoint
        self.note_save()

    def note_save(self) -> None:
        """Note that the present step is saved now."""
        self.saved_step, self._saved_time = self._training.step, time.monotonic()

    def is_due_by_time(self) -> bool:
        """Return whether the minutes between two checkpoints have passed."""
        minutes = 0.0 if self._checkpoint.every else self._checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - self._saved_time >= 60 * minutes

    def is_due(self, done: StepRecord) -> bool:
        """Return whether this step, which was just done, is saved."""
        step, every = self._training.step, self._checkpoint.every
        if done.stop or done.save or step == self._training.config.train.steps:
            return True
        return every > 0 and step % every == 0


def _loop(
    training: Training, source: Source, reporter: Reporter, link: WorkerLink, copies: MemorySnapshots
) -> int | None:
    """Run the remaining steps, and return the exit status; None: another team will follow."""
    last_step, schedule = training.config.train.steps, _SaveSchedule(training)
    program = training.program

    def stop_asked() -> bool:
        return link.wish() is not None or (program is not None and program.asks_to_stop)

    def save_due() -> bool:
        return schedule.is_due_by_time() or (program is not None and program.asks_to_save)

    for done in _traced(training, stop_asked, save_due, source):
        link.progress("step", training.step)
        _tell_of_waiting(training, link)
        keep_copy(training, copies)
        last = training.step == last_step
        evaluate = _evaluation_is_due(training, done)
        if evaluate:
            link.progress("evaluate", training.step)
        reporter.step(done, held_out_loss(training) if evaluate else None)
        if training.mesh.is_main:
            log.info("step %d: %.6f s, %s", done.step, done.seconds, done.spans)
        if schedule.is_due(done):
            link.progress("save", training.step)  # it may wait for the save before
            save(training, wait=last or done.stop)
            schedule.note_save()
        reporter.saves(outcomes := training.checkpointer.outcomes())
        check_saves(training, outcomes)
        if done.stop and not last:
            if _is_ended_by_program(training, link):
                last_step = training.step
                break
            return _agree_on_end(training, reporter, link.stop_status())
        if evaluate or schedule.saved_step == training.step:  # do not count their time in the next step
            training.comm.ledger.take()
            training.comm.clock.restart()
            link.progress("step", training.step)
            _tell_of_waiting(training, link)
    if training.step < last_step:  # the run was asked to stop while it waited for gradients
        if schedule.saved_step != training.step:
            save(training)
        training.checkpointer.finish(LAST_SAVE_SECONDS)
        reporter.saves(training.checkpointer.outcomes())
        return _agree_on_end(training, reporter, link.stop_status())
    source.finish()
    if program is not None:
        reporter.logged(program.take_logged())
    assert schedule.saved_step == training.step, "a run ends with its last step saved"
    link.progress("end", training.step)
    reporter.end(_sampled(training, reporter))
    return 0


def _evaluation_is_due(training: Training, done: StepRecord) -> bool:
    """Return whether to evaluate now: after the last step, and every `train.evaluate_every` steps."""
    train, step = training.config.train, training.step
    if done.stop:
        return False
    return step == train.steps or (train.evaluate_every > 0 and step % train.evaluate_every == 0)


def _sampled(training: Training, reporter: Reporter) -> str | None:
    """Return the model's continuation of the job's prompt, if it has one. Training is done and saved, so a
    failure only causes a warning."""
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
    """Raise if too many saves in a row have failed. Only the main rank knows the results and raises; the
    launcher then ends the other ranks."""
    failed, most = training.checkpointer.failed_in_a_row, training.config.checkpoint.max_failed_saves
    if training.mesh.is_main and outcomes and isinstance(outcomes[-1], SaveFailed) and 0 < most <= failed:
        raise RunFailed(
            f"{counted(failed, 'save')} in a row failed, so the run stops before more work is at risk "
            f"(checkpoint.max_failed_saves = {most}; 0: go on without). The last one: {outcomes[-1].message}"
        )


def _tell_of_waiting(training: Training, link: WorkerLink) -> None:
    """Tell the host if this rank may wait for other ranks in the next step, so that the host does not take
    the wait for a hang."""
    if training.rank_driver.may_wait(training.step + 1):
        link.progress("meet", training.step)


def _is_ended_by_program(training: Training, link: WorkerLink) -> bool:
    """Return whether the programs of some ranks have ended the run, and nobody else has asked for a stop."""
    if training.program is None:
        return False
    asked = training.peers.all_gather([training.program.asks_to_stop, link.wish() is not None])
    return any(program for program, _ in asked) and not any(other for _, other in asked)


def _agree_on_end(training: Training, reporter: Reporter, status: int | None) -> int | None:
    """Return the exit status of a run that stopped on all ranks after the same step, if any rank was asked to
    end it; None: the ranks form another team.
    """
    status = max(training.peers.all_gather(status or 0)) or None
    reporter.stopped(status is not None)
    return status


def _traced(
    training: Training, stop_asked: Callable[[], bool], save_due: Callable[[], bool], source: Source
) -> Iterator[StepRecord]:
    """Yield the steps, and write a trace of as many as `observe.trace`, beginning with the second."""
    done_steps = steps(training, stop_asked, save_due, source)
    if not training.config.observe.trace:
        return done_steps
    trace = _profiled if training.mesh.device.type == "cuda" else _timeline
    return trace(training, done_steps)


def _timeline(training: Training, done_steps: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Yield the steps, and write a trace from the clock and the ledger, which is complete on CPUs."""
    trace, wanted = StepTrace(training.mesh.worker.rank), training.config.observe.trace
    for index, done in enumerate(done_steps):
        if 1 <= index <= wanted:
            trace.add(done.step, training.comm.clock.finished, training.comm.ledger.taken)
            if index == wanted or done.stop or done.step == training.config.train.steps:
                trace.write(Path(training.config.run.folder))
        yield done


def _profiled(training: Training, done_steps: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Yield the steps, and write a trace from torch's profiler, which GPUs need."""
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
    """Raise if workers were started with different jobs, because they would wait for each other forever.

    Only the decisions of the plans are compared. Reasons and predictions depend on each node's memory.
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
