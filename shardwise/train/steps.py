"""The training loop: a generator that yields a record of each step.

A step consists of forward and backward over the micro-batches, the exact global norm, the fused update, and
one read of the results. The host waits for the device once, after all work is queued, so a GPU always has
work between steps. A non-finite loss or gradient is detected on the device, so that the update does not
change the weights; the host learns of it from the results.

Other files have the sources of gradients (train/sources.py, drivers/), the values that ranks exchange in
every step (train/votes.py), the check of float8 scales (train/float8_check.py), the handling of non-finite
numbers (train/non_finite.py), checks of copies (train/guard.py) and the record of a step (train/record.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.optim import global_norm, update
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.build import Training
from shardwise.train.float8_check import Float8Check
from shardwise.train.guard import check_copies, check_gradients
from shardwise.train.non_finite import overflowed
from shardwise.train.record import QueuedNumbers, StepRecord, StepRecorder
from shardwise.train.sources import Source, at_least_some
from shardwise.train.step_gradients import ProgramSums
from shardwise.train.votes import VOTES, message_to_all, share, vote_of_this_rank

__all__ = ["StepRecord", "divisor", "gradient_norm", "never", "steps"]


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
    train, clock = training.config.train, training.comm.clock
    given, source = source, source or training.rank_driver.source(training)
    float8, recorder = Float8Check(training), StepRecorder(training)
    try:
        clock.restart()
        float8.begin_step()
        while training.step < train.steps:
            step, scale = training.step + 1, training.scale.value
            training.comm.step, training.comm.loss_scale = step, scale

            # Draw the rows of a global batch, and compute their gradient: complete and summed, on this rank.
            float8.begin_gradients()
            drawn = source.draw()
            if drawn is None:
                return  # asked to stop while the source waited for gradients

            # In float8: if a tensor outgrew its scale, the weights stay as they are and the step is repeated.
            scales = float8.check()

            # The norm of the gradient, and one sum over all ranks: of the loss and the message of each rank.
            vote = vote_of_this_rank(training, stop_asked, save_due)
            message = message_to_all(training, drawn.checksum, vote, recorder.seconds_of_this_rank())
            with clock.span("forward_backward"):
                norm = gradient_norm(training) if drawn.norm is None else drawn.norm
                more = () if drawn.program is None else (drawn.program.numbers,)
                shared = share(training, torch.cat((drawn.loss.double().reshape(1), message, *more)))
                items = per_item(shared, drawn.program).to(norm.dtype)
                norm = norm / items
            checked = train.check_every > 0 and step % train.check_every == 0
            if checked or recorder.last is None:
                check_gradients(training)

            # The update, which changes nothing if a number is not finite. The host does not wait here.
            lr = learning_rate(train, step) * drawn.rate
            with clock.span("optimizer"):
                loss = shared[0]
                usable = scales.fits(torch.isfinite(norm) & torch.isfinite(loss))
                again = scales.outgrown(loss)
                if drawn.updates is None:
                    divide_by = divisor(training, norm, drawn.clip) * items
                    update(training.optimizer, lr, divide_by, (~usable).float())
                loads = _balance_experts(training, usable)
                # Groups that train independently may exchange weights now.
                training.rank_driver.after_update(training, shared[VOTES], again)
            float8.begin_step()  # the next step's scales, while the device has work
            if checked or (recorder.last is None and training.program is not None):
                check_copies(training)  # in a program's first step: do buffers depend on a device's samples?

            # Prepare the next rows while the device works; then wait for it, once, and record the step.
            queued = QueuedNumbers(
                shared, norm, drawn.tokens, again, loads, scales.numbers(training.comm.device), drawn.program
            )
            source.prepare_next()
            numbers = queued.read()
            if numbers.again:
                _clear_gradients(training)
                recorder.made_again()
                source.repeat_last()
                continue
            skipped = overflowed(training, numbers)
            _clear_gradients(training)
            training.scale = training.scale.after(skipped)
            training.step, training.sequences = step, training.sequences + train.global_batch
            done = recorder.record(numbers, drawn, lr, scale, skipped)
            yield replace(done, logged=dict(source.step_done(done)))
            if done.stop:
                return
    finally:
        if given is None:
            source.close()


def gradient_norm(training: Training) -> Tensor:
    """Return the norm of the gradients in place, without the loss scale."""
    parameters = (parameter for _, parameter in training.parallel.named_parameters(once=True))
    return global_norm(parameters, training.comm) / training.scale.value


def per_item(shared: Tensor, program: ProgramSums | None) -> Tensor:
    """Divide the losses of a program in place by their number of items. Return the number of items, by which
    the gradients have still to be divided; both are relative to the rows of the global batch. It is one
    without a program, whose gradients are means already."""
    if program is None:
        return torch.ones_like(shared[0])
    losses = shared[-len(program.names) :]
    items = at_least_some(shared[-len(program.names) - 1])
    shared[:1] /= items
    losses /= items
    return items


def divisor(training: Training, norm: Tensor, clip: float | None) -> Tensor:
    """Return the divisor of the gradients in the update: the loss scale, times norm / limit if the norm
    exceeds the limit `clip`."""
    excess = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
    return excess * training.scale.value


def _clear_gradients(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=not training.parallel.keeps_gradients)


def _balance_experts(training: Training, usable: Tensor) -> Tensor:
    """Adjust the routers by the loads of this step, unless the step is skipped. Return the worst imbalance of
    a layer and the load of each expert; an empty tensor for a model without experts."""
    parallel, comm = training.parallel, training.comm
    if not training.config.model.experts:
        return torch.empty(0, device=comm.device)
    loads = parallel.take_loads()
    parallel.balance(loads * usable)
    worst = (loads.double() / loads.double().mean(1, keepdim=True)).flatten()
    worst = torch.cat((worst, worst.new_zeros(1))).max()  # zero for a stage without experts
    comm.all_reduce(worst, "pipeline", op=torch.distributed.ReduceOp.MAX)
    sums = comm.all_reduce(loads.sum(0) + loads.new_zeros(training.config.model.experts), "pipeline").double()
    return torch.cat((worst.unsqueeze(0), sums / sums.mean()))
