"""The training loop: a generator that yields a record of each step.

A step consists of forward and backward over the micro-batches, the exact global norm, the fused update, and
one read of the results. The host waits for the device once, after all work is queued, so a GPU always has
work between steps. A non-finite loss or gradient is detected on the device, so that the update does not
change the weights; the host learns of it from the results.

Other files have the sources of gradients (train/sources.py, drivers/), the sums over ranks
(train/step_sums.py), the check of float8 scales (train/float8_check.py), the handling of non-finite numbers
(train/non_finite.py), checks of copies (train/guard.py) and the record of a step (train/record.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.optim import update
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.build import Training
from shardwise.train.float8_check import Float8Check
from shardwise.train.guard import check_copies, check_gradients, check_sums
from shardwise.train.non_finite import overflowed
from shardwise.train.record import QueuedNumbers, StepRecord, StepRecorder
from shardwise.train.sources import Source
from shardwise.train.step_gradients import StepGradients, divisor
from shardwise.train.step_sums import StepSums, message_to_all, sum_over_ranks, vote_of_this_rank

__all__ = ["StepRecord", "never", "steps"]


def never() -> bool:
    """Default for `stop_asked` and `save_due`: return False."""
    return False


def steps(
    training: Training,
    stop_asked: Callable[[], bool] = never,
    save_due: Callable[[], bool] = never,
    source: Source | None = None,
) -> Generator[StepRecord]:
    """Train from the present step to the last one, and yield a record of each.

    The gradients come from `source`, which the caller closes; by default it is the driver's. `stop_asked` is
    called on every rank: if it returns True on one, all ranks stop after the same step. `save_due` is called
    on the main rank: if it returns True, the records of the same step have `save` on all ranks.
    """
    given, source = source, source or training.rank_driver.source(training)
    float8, recorder = Float8Check(training), StepRecorder(training)
    try:
        training.comm.clock.restart()
        float8.begin_step()
        while training.step < training.config.train.steps:
            training.comm.step, training.comm.loss_scale = training.step + 1, training.scale.value

            # The gradients of a global batch: complete and summed, on this rank.
            float8.begin_gradients()
            gradients = source.compute_gradients()
            if gradients is None:
                return  # asked to stop while the source waited for gradients
            check_sums(training)
            scales = float8.check()

            # Their norm, and one sum over all ranks: of the loss and the message of each rank.
            vote = vote_of_this_rank(training, stop_asked, save_due)
            message = message_to_all(training, gradients.checksum, vote, recorder.seconds_of_this_rank())
            sums = sum_over_ranks(training, gradients, message)
            _check_before_update(training, recorder)

            # The update. It changes nothing if a number is not finite, or if a float8 tensor has outgrown its
            # scale: then the step is repeated. The host does not wait here.
            usable, repeat = scales.fits(sums.are_finite), scales.outgrown(sums.loss)
            loads = _update(training, gradients, sums, usable, repeat)
            float8.begin_step()
            _check_after_update(training, recorder)

            # Prepare the next rows while the device works. Then wait for it, once.
            queued = QueuedNumbers(sums, gradients, repeat, loads, scales.numbers(training.comm.device))
            source.prepare_next()
            numbers = queued.read()
            if numbers.repeat:
                _clear_gradients(training)
                recorder.note_repeat()
                source.repeat_last()
                continue

            # Go on to the next step, and record this one.
            skipped = overflowed(training, numbers)
            _clear_gradients(training)
            training.scale = training.scale.after(skipped)
            training.step += 1
            training.sequences += training.config.train.global_batch
            done = recorder.record(numbers, gradients, skipped)
            yield replace(done, logged=dict(source.step_done(done)))
            if done.stop:
                return
    finally:
        if given is None:
            source.close()


def _update(
    training: Training, gradients: StepGradients, sums: StepSums, usable: Tensor, repeat: Tensor
) -> Tensor:
    """Update the weights if `usable`, unless the source has done so, and let groups that train independently
    exchange theirs. Return the loads of the experts."""
    lr = learning_rate(training.config.train, training.step + 1) * gradients.rate
    with training.comm.clock.span("optimizer"):
        if gradients.updates is None:
            divide_by = divisor(training, sums.norm, gradients.clip) * sums.items
            update(training.optimizer, lr, divide_by, (~usable).float())
        loads = _balance_experts(training, usable)
        training.rank_driver.after_update(training, sums.votes, repeat)
    return loads


def _check_before_update(training: Training, recorder: StepRecorder) -> None:
    """Check that all weights have gradients, in the first step and where checks are due."""
    if recorder.last is None or _checks_are_due(training):
        check_gradients(training)


def _check_after_update(training: Training, recorder: StepRecorder) -> None:
    """Check that copies are equal where checks are due, and in the first step of a program, whose buffers may
    depend on a device's samples."""
    if (recorder.last is None and training.program is not None) or _checks_are_due(training):
        check_copies(training)


def _checks_are_due(training: Training) -> bool:
    """Return whether `train.check_every` asks for checks in the present step."""
    every = training.config.train.check_every
    return every > 0 and (training.step + 1) % every == 0


def _clear_gradients(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=not training.parallel.keeps_gradients)


def _balance_experts(training: Training, usable: Tensor) -> Tensor:
    """Adjust the routers by the loads of this step, unless the step is skipped. Return the worst imbalance of
    a layer and the load of each expert; an empty tensor for a model without such routers."""
    parallel, comm = training.parallel, training.comm
    if not training.config.model.experts or training.config.model.is_of_program:
        return torch.empty(0, device=comm.device)
    loads = parallel.take_loads()
    parallel.balance(loads * usable)
    worst = (loads.double() / loads.double().mean(1, keepdim=True)).flatten()
    worst = torch.cat((worst, worst.new_zeros(1))).max()  # zero for a stage without experts
    comm.all_reduce(worst, "pipeline", op=torch.distributed.ReduceOp.MAX)
    sums = comm.all_reduce(loads.sum(0) + loads.new_zeros(training.config.model.experts), "pipeline").double()
    return torch.cat((worst.unsqueeze(0), sums / sums.mean()))
