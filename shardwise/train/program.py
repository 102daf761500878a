"""A user's program: a function of an engine, with a training loop of its own.

`run.program = "file.py:function"` names it. On each worker the program runs in a thread of its own, by turns
with the ordinary training loop (train/turns.py), for which it is a source of gradients like any other: it
runs until it has called `engine.optim_step`, the loop makes the step, and the program goes on. So everything
around a step (saves, recovery, records, `verify`, `drill`) is that of every run.

Before its first batch a program says what it trains: model, optimizer, data. That part is run once before any
worker starts, in the process that plans (`described`), and again on each worker, in each team.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.config import Config
from shardwise.data.batches import Batch
from shardwise.data.random_numbers import seed_process
from shardwise.data.samples import MicroBatch, Reader, Reading, Samples, with_positions
from shardwise.data.streams import Stream
from shardwise.errors import UserError
from shardwise.models import LossCall, LossSums, attention_backends
from shardwise.models.program_module import LossFunction
from shardwise.models.torch_dtypes import DTYPES
from shardwise.plurals import counted
from shardwise.train.check_loss import check_program_loss
from shardwise.train.program_call import call_program, why_no_batch
from shardwise.train.program_outputs import export, means_over
from shardwise.train.program_request import SECOND_LOOP, Request
from shardwise.train.program_state import check_can_be_saved, from_bytes, to_bytes
from shardwise.train.program_values import (
    Metrics,
    StepBatch,
    check_logged_names,
    check_names_of_losses,
    next_token_loss,
)
from shardwise.train.turns import Turns

if TYPE_CHECKING:
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.record import StepRecord
    from shardwise.train.sources import RankRows
    from shardwise.train.step_gradients import StepGradients

AGREE_SECONDS = 30.0
"""How long a worker waits for the others to make a call that all have to make."""


class Program:
    """One run of a user's program in this process. The engine's calls end here."""

    def __init__(self, config: Config, run: Callable[[Program], object]) -> None:
        """`run` calls the user's function with an engine for this program."""
        assert config.run.program is not None, "the job has a program"
        self.config, self.address = config, config.run.program
        self.asked = Request(config)
        """What the program has asked for."""
        self.training: Training | None = None
        """The training of the program's team; None before its first batch."""
        self.asks_to_stop = self.asks_to_save = False
        self.state: dict[str, Any] = {}
        """Values that the program keeps."""
        self.link: WorkerLink | None = None
        self._logged: dict[str, float] = {}
        self._loop_begun = False
        self._batch: StepBatch | None = None
        """The batch that the program has now; None: it has used it."""
        self._call: tuple[LossFunction, StepBatch] | None = None
        """The last call of `forward_backward`."""
        self._gradients: StepGradients | None = None
        self._metrics = Metrics()
        self._samples_reader: Reader | None = None
        """Reads the program's own data."""
        self._rows: RankRows | None = None
        """Reads the job's data."""
        self._state_of_data: object = None
        """State of the dataset that was saved with the checkpoint."""
        self._ahead: StepBatch | None = None
        self._finished, self._calls = False, 0
        self._state_checked = False
        """Whether the program's values have been checked after a step."""
        self._names: tuple[str, ...] = ()
        """Names of the losses of the step before; none before the first step."""
        self._returned: object = None
        """What the user's function returned; None: it has not returned yet."""
        self._turns = Turns(lambda: self._run(run))

    def _run(self, run: Callable[[Program], object]) -> None:
        self._returned = call_program(self.address, run, self)

    def request(self, call: str) -> Request:
        """Return what the program asks for, for a call that belongs before the loop."""
        if not self._loop_begun:
            return self.asked
        if call != "batches":
            raise UserError(f"engine.{call} comes before the loop over engine.batches(...)")
        if not self._finished:
            raise UserError(SECOND_LOOP)
        raise UserError(
            "engine.batches was called again after its loop, which has made all steps of the run. For "
            "several epochs say engine.batches(..., epochs=3), and leave the loop over epochs out"
        )

    # The loop's side

    @property
    def callbacks(self) -> Sequence[object]:
        """Objects whose methods are called on steps and events."""
        return self.asked.callbacks

    def begin(self) -> Request:
        """Run the program up to its first batch, and return what it has asked for.

        Generators are seeded first: workers that survived a fault have drawn more random numbers than new
        ones, and all must make the same dataset.
        """
        seed_process(self.config.train.seed)
        self._turns.resume()
        if not self._loop_begun:
            raise UserError(f"{self.address}: {why_no_batch(self._returned)}")
        if not self.asked.prepared:
            raise UserError(
                f"{self.address}: the program has no model; call engine.prepare(...) before its loop"
            )
        check_can_be_saved("engine.state", self.state)
        return self.asked

    def bind(self, training: Training) -> None:
        """Let the program train with this team."""
        from shardwise.train.sources import RankRows

        self.training = training
        config, plan, samples = training.config, training.plan, self.asked.samples
        if samples is None:
            self._rows = RankRows(training)
            return
        reading = Reading(
            global_batch=config.train.global_batch,
            rows=training.shares.of(training.mesh.data_index),
            micro_batches=plan.accumulation,
            device=training.mesh.device,
            dtype=DTYPES[plan.model.dtypes.compute],
            seen=training.sequences,
            state=self._state_of_data,
        )
        self._samples_reader = samples.reader(reading)

    def next_gradients(self) -> StepGradients:
        """Let the program compute the gradients of the next step, and return them."""
        self._resume()
        assert self._gradients is not None, "the program waits in optim_step"
        return self._gradients

    def _resume(self) -> None:
        """Let the program run to where it waits next. It may end only after the last step."""
        self._turns.resume()
        training = self.present()
        if self._turns.ended and training.step < training.config.train.steps:
            raise UserError(
                f"{self.address} returned on worker {training.mesh.worker.rank} after step {training.step} "
                f"of {training.config.train.steps}. Every worker has to make every step; to end a run early, "
                "call engine.stop() on any worker, and go on until engine.batches(...) ends"
            )

    def gradients_again(self) -> StepGradients:
        """Compute the gradients of the present step once more."""
        assert self._call is not None, "the step has been computed"
        return replace(self._compute(*self._call), clip=self._gradients.clip if self._gradients else None)

    def read_ahead(self) -> None:
        """Read the batch of the next step."""
        training = self.present()
        if training.step + 1 < training.config.train.steps and self._ahead is None:
            self._ahead = self._read()

    def after_step(self, done: StepRecord) -> dict[str, float]:
        """Give the program the numbers of a step, and let it run to where it asks for the next batch: what it
        keeps in `engine.state` then belongs to the step. Return the numbers that it records with the step."""
        self.asks_to_save = False
        numbers = {
            "loss": done.loss,
            "gradient_norm": done.gradient_norm,
            "learning_rate": done.learning_rate,
            "seconds": done.seconds,
        }
        items = done.losses.get("items", float(done.tokens))
        self._metrics.fill({**done.losses, **numbers, "items": items})
        self._gradients = self._batch = None
        self._resume()
        if not self._state_checked:  # not with the first save only, which may be a long time later
            self._check_saved_values()
            self._state_checked = True
        return self.take_logged()

    def saved_state(self) -> Tensor:
        """Return the program's values as bytes."""
        try:
            saved = to_bytes({"state": self.state, "data": self._state_of_dataset()})
        except Exception:
            self._check_saved_values()
            raise
        return torch.frombuffer(bytearray(saved), dtype=torch.uint8)

    def _check_saved_values(self) -> None:
        """Raise if a value of the program, or of its dataset, cannot be saved."""
        check_can_be_saved("engine.state", self.state)
        check_can_be_saved("the state_dict() of the dataset", self._state_of_dataset())

    def _state_of_dataset(self) -> object:
        """Return the state of the dataset after the samples that the run has seen; None: it has none."""
        reader = self._samples_reader
        return None if reader is None else reader.state_at(self.present().sequences)

    def load_state(self, saved: Tensor) -> None:
        """Replace the program's values by saved ones."""
        values = from_bytes(bytes(saved.numpy()))
        self._state_of_data = values["data"]
        self.state.clear()
        self.state.update(values["state"])

    def take_logged(self) -> dict[str, float]:
        """Return the numbers that the program has recorded since the last call."""
        logged, self._logged = self._logged, {}
        return logged

    def finish(self) -> None:
        """Let the program run to its end, after the last step."""
        self._finished = True
        if not self._turns.ended:
            self._turns.resume()
        if not self._turns.ended:
            raise UserError(
                f"{self.address}: the program goes on after the last step, train.steps = "
                f"{self.present().config.train.steps}; end its loop when engine.batches(...) ends"
            )

    def leave(self) -> None:
        """End the program where it waits."""
        self._turns.leave()
        self._samples_reader = self._rows = None

    # The program's side

    def present(self) -> Training:
        """Return the training of this team."""
        if self.training is None:
            raise UserError(
                "the engine knows its workers and steps inside the loop over engine.batches(...) only"
            )
        return self.training

    def batches(self) -> Iterator[StepBatch]:
        """Yield this rank's part of each global batch."""
        self._loop_begun = True
        self._turns.wait()
        training = self.present()
        if training.mesh.device.type == "cuda":
            torch.cuda.set_device(training.mesh.device)  # each thread has its own
        while not self._finished:
            self._batch, self._ahead = self._ahead or self._read(), None
            yield self._batch
            if self._batch is not None:
                raise UserError(
                    f"step {training.step + 1}: the program asked for another batch before it used this "
                    "one; call engine.forward_backward(loss, batch) and engine.optim_step() for every batch"
                )
            self._turns.wait()

    def _read(self) -> StepBatch:
        if self._samples_reader is not None:
            with self.present().comm.clock.span("data"):
                return StepBatch(next(self._samples_reader))
        assert self._rows is not None, "the program has a team"
        return StepBatch(self._rows.next_batch())

    def forward_backward(self, loss: LossFunction, batch: StepBatch) -> Metrics:
        """Compute the gradients of a batch."""
        training = self.present()
        if not isinstance(batch, StepBatch):
            raise UserError(
                f"engine.forward_backward: the batch is a {type(batch).__name__}; give one of engine.batches"
            )
        if self._gradients is not None:
            raise UserError(
                f"step {training.step + 1}: engine.forward_backward was called twice. A step has one batch; "
                "return several losses as a dictionary, and call engine.optim_step() between two batches"
            )
        if batch is not self._batch:
            raise UserError(f"step {training.step + 1}: engine.forward_backward got a batch of another step")
        samples, first = self.asked.samples, training.step == 0 and self._call is None
        self._call, self._metrics = (loss, batch), Metrics()
        if first and self._samples_reader is not None and samples is not None:
            check_program_loss(training, loss, samples, self._samples_reader.sample())
        self._gradients = self._compute(loss, batch)
        return self._metrics

    def _compute(self, loss: LossFunction, batch: StepBatch) -> StepGradients:
        from shardwise.train.step_gradients import ProgramSums, StepGradients

        training, parts = self.present(), batch.micro_batches
        if loss is next_token_loss and not self.config.model.is_of_program:
            return self._compute_by_job(batch)
        if not self.config.model.is_of_program:
            raise UserError(
                "engine.prepare() without a function trains the model of the job, whose loss is "
                "shardwise.next_token_loss; to use another loss, give engine.prepare a function that makes "
                "the model"
            )
        if loss is next_token_loss and training.plan.layout.context > 1:
            raise UserError(
                f"layout.context = {training.plan.layout.context}: shardwise.next_token_loss does not tell a "
                "model of your own the positions of its tokens; write a loss function that passes "
                'batch["positions"] to the model'
            )
        rows, sums = training.config.train.global_batch, LossSums()
        calls = [LossCall(loss, self._on_this_device(part), part.first, sums) for part in parts]
        dtype = DTYPES[training.plan.model.dtypes.sums]
        factor = torch.tensor(training.scale.value / rows, dtype=dtype, device=training.mesh.device)
        with training.comm.clock.span("forward_backward"), attention_backends(training.mesh.device.type):
            total = training.parallel.forward_backward(calls, factor) / rows
        self._names = self._names_of_losses(sums)
        numbers = sums.vector(self._names, training.mesh.device) / rows
        tokens = torch.tensor(float(rows), device=training.mesh.device)
        return StepGradients(total, tokens, self._checksum(batch), program=ProgramSums(self._names, numbers))

    def _on_this_device(self, part: MicroBatch | Batch) -> Any:
        """Return what a loss function gets of a micro-batch."""
        samples, parallel = self.asked.samples, self.present().parallel
        if isinstance(part, MicroBatch) and samples is not None:
            return with_positions(part.values, samples.sequences, parallel.positions, parallel.multiple)
        assert isinstance(part, Batch), "the data are those of the job"
        values = {"inputs": part.inputs, "targets": part.targets}
        if part.documents is not None:
            values["documents"] = part.documents
        return with_positions(values, tuple(values), parallel.positions, parallel.multiple)

    def _names_of_losses(self, sums: LossSums) -> tuple[str, ...]:
        """Return the names of the losses in their order. Raise if ranks have losses of other names, whose
        sums would be mixed up."""
        training, names = self.present(), sums.names
        if training.plan.layout.pipeline > 1:  # only the last stage has losses
            names = names or self._names
            if not self._names:
                different = {tuple(each) for each in training.peers.all_gather(names) if each}
                names = min(different) if len(different) == 1 else names
        if names == self._names:
            return names
        check_names_of_losses(names, training.step + 1)
        point = f"losses {training.step} {names}"
        if training.mesh.missing_at(point, AGREE_SECONDS):
            raise UserError(
                f"step {training.step + 1}: the loss function returned {', '.join(names)} on worker "
                f"{training.mesh.worker.rank}, and other names on another one or in the step before. Return "
                "the same names for every batch, with a loss of 0 * … where one does not apply"
            )
        return names

    def _compute_by_job(self, batch: StepBatch) -> StepGradients:
        """Compute the gradients of the job's model and data, as a run without a program does."""
        assert self._rows is not None, "the data are those of the job"
        return replace(self._rows.gradients(list(batch.micro_batches)), clip=None)  # type: ignore[arg-type]

    def _checksum(self, batch: StepBatch) -> int:
        """Return the checksum of this rank's samples; 0 on ranks that read the same ones as another."""
        mesh = self.present().mesh
        reports = mesh.coordinate("pipeline") == mesh.coordinate("context") == 0
        return sum(part.checksum for part in batch.micro_batches) if reports else 0

    def clip_grad_norm(self, limit: float) -> None:
        """Limit the norm of the gradients of this step."""
        if self._gradients is None:
            raise UserError(
                "engine.clip_grad_norm comes after engine.forward_backward and before engine.optim_step"
            )
        if not limit > 0:
            raise UserError(f"engine.clip_grad_norm({limit}): the largest norm must be above 0")
        self._gradients = replace(self._gradients, clip=float(limit))

    def optim_step(self) -> Metrics:
        """Make the step, and return its numbers."""
        training = self.present()
        if self._gradients is None:
            raise UserError(
                f"step {training.step + 1}: engine.optim_step() without gradients; call "
                f"engine.forward_backward before"
            )
        self._turns.wait()
        return self._metrics

    def stop(self) -> None:
        """Ask to end the run after the present step, on all workers."""
        self.asks_to_stop = True

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers with the present step."""
        check_logged_names(values)
        self._logged |= {name: float(value) for name, value in values.items()}

    def evaluate(self, function: LossFunction, samples: Samples) -> dict[str, float]:
        """Return means over a whole dataset."""
        training = self.present()
        if self._gradients is not None:
            raise UserError(
                "engine.evaluate comes after engine.optim_step, and not between it and forward_backward"
            )
        if not self.config.model.is_of_program:
            raise UserError(
                "engine.evaluate: is for a model that engine.prepare makes; set train.evaluate_every"
            )
        if not isinstance(samples, Stream) and not samples.count():
            raise UserError("engine.evaluate: the dataset is empty")
        samples = replace(samples, seed=self.config.train.seed)
        if self.asked.samples is not None:
            samples = replace(samples, sequences=self.asked.samples.sequences)
        elif training.plan.layout.context > 1:
            raise UserError(
                "engine.evaluate: with layout.context it is for programs with a dataset of their own, whose "
                "sequences engine.batches(..., sequences=…) names"
            )
        self._agree("engine.evaluate")
        if self.link is not None:
            self.link.progress("evaluate", training.step)
        means = means_over(training, function, samples, self._agree)
        if self.link is not None:
            self.link.progress("step", training.step)
        return means

    def _agree(self, call: str) -> None:
        """Raise if another rank does not make the same call now. All would wait for each other forever."""
        training, self._calls = self.present(), self._calls + 1
        others = training.mesh.missing_at(f"{self._calls} {call} {training.step}", AGREE_SECONDS)
        if others:
            raise UserError(
                f"worker {training.mesh.worker.rank} called {call} after step {training.step}, and "
                f"{counted(len(others), 'worker')} did not within {AGREE_SECONDS:.0f} s (worker "
                f"{', '.join(map(str, others[:8]))}). Every worker has to make the same calls in the same "
                "order"
            )

    def export(self, path: str) -> None:
        """Write whole weights and buffers to a file, on the main rank."""
        training = self.present()
        self._agree("engine.export")
        export(training, path)
