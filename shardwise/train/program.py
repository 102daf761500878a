"""A user's program: a function of an engine, with a training loop of its own.

`run.program = "file.py:function"` names it. On each worker the program runs in a thread of its own, by turns
with the ordinary training loop (train/turns.py), for which it is a source of gradients like any other: it
runs until it has called `engine.optim_step`, the loop makes the step, and the program goes on. So everything
around a step (saves, recovery, records, `verify`, `drill`) is that of every run.

Before its first batch a program says what it trains: model, optimizer, data. That part is run once before any
worker starts, in the process that plans (`described`), and again on each worker, in each team.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from shardwise.config import Config, brings_data
from shardwise.data.batches import Batch
from shardwise.data.samples import MicroBatch, SampleReader, Samples, to_device
from shardwise.errors import ConfigError, UserError
from shardwise.models import IGNORED, LossCall, LossSums, attention_backends, use_factory
from shardwise.models.program_module import LossFunction
from shardwise.models.torch_dtypes import DTYPES
from shardwise.optimizers import address_of, from_table
from shardwise.plurals import counted
from shardwise.section import Section
from shardwise.train.check_loss import check_program_loss
from shardwise.train.turns import Turns

if TYPE_CHECKING:
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.record import StepRecord
    from shardwise.train.sources import RankRows
    from shardwise.train.step_gradients import Drawn

AGREE_SECONDS = 30.0
"""How long a worker waits for the others to make a call that all have to make."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """This worker's samples of one global batch, which `Engine.forward_backward` takes."""

    micro_batches: Sequence[MicroBatch] | Sequence[Batch]
    """The samples that are computed at once, one after the other."""


def next_token_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of predicting each next token of the job's data, and the number of targets. The
    model's `forward(inputs, targets)` returns that sum."""
    return model(batch["inputs"], batch["targets"]), (batch["targets"] != IGNORED).sum()


class Metrics(Mapping[str, float]):
    """Numbers of a step, known after `Engine.optim_step`."""

    def __init__(self) -> None:
        self._values: dict[str, float] | None = None

    def _known(self) -> dict[str, float]:
        if self._values is None:
            raise UserError(
                "the numbers of a step are known after engine.optim_step(), which sums over workers"
            )
        return self._values

    def __getitem__(self, name: str) -> float:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def fill(self, values: dict[str, float]) -> None:
        """Set the numbers."""
        self._values = values

    def __repr__(self) -> str:
        return (
            "Metrics(known after engine.optim_step())" if self._values is None else f"Metrics({self._values})"
        )


@dataclass
class Request:
    """What a program has asked for before its first batch."""

    prepared: bool = False
    optimizer: dict[str, Any] | None = None
    """Table [optimizer]; None: that of the job."""
    train: dict[str, Any] = field(default_factory=dict)
    """Values of [train] that the job may replace."""
    samples: Samples | None = None
    """The program's own data; None: those of the job."""
    steps: int | None = None
    epochs: float | None = None


class Program:
    """One run of a user's program in this process. The engine's calls end here."""

    def __init__(self, config: Config, run: Callable[[Program], object]) -> None:
        """`run` calls the user's function with an engine for this program."""
        assert config.run.program is not None, "the job has a program"
        self.config, self.address = config, config.run.program
        self.request = Request()
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
        self._drawn: Drawn | None = None
        self._metrics = Metrics()
        self._reader: SampleReader | RankRows | None = None
        self._ahead: StepBatch | None = None
        self._finished, self._calls = False, 0
        self._names: tuple[str, ...] = ()
        """Names of the losses of the step before."""
        self._turns = Turns(lambda: run(self))

    # What a program says first

    def prepare(self, make: Callable[[], nn.Module] | None, sharding: object) -> None:
        """Let `make` make the model, with a sharding table or none."""
        self._only_before_batches("prepare")
        if isinstance(make, nn.Module) or (make is not None and not callable(make)):
            raise UserError(
                f"engine.prepare: got a {type(make).__name__}; give the function that makes the model, as in "
                "engine.prepare(make_model) or engine.prepare(lambda: Model(64))"
            )
        own = self.config.model.is_of_program
        if own and make is None:
            raise UserError(
                "engine.prepare() without a function trains the model of the job, and the job has no table "
                "[model]; give a function that makes the model, or for example model.preset=tiny"
            )
        if make is not None and not own:
            raise UserError(
                "engine.prepare: the program makes its model, and the job has a table [model] too; leave "
                "one out"
            )
        self.request.prepared = True
        if make is not None:
            use_factory(lambda: _with_table(make(), sharding))

    def choose_optimizer(self, name: object, lr: float | None, settings: Mapping[str, object]) -> None:
        """Use this optimizer, by its name or its class, with this peak learning rate."""
        self._only_before_batches("optimizer")
        if not isinstance(name, str):
            name = address_of(name)
        self.request.optimizer = {"name": name, **settings}
        if lr is not None:
            self.request.train["learning_rate"] = lr

    def batches(
        self, samples: Samples | None, global_batch: int | None, steps: int | None, epochs: float | None
    ) -> Iterator[StepBatch]:
        """Return the batches of the run."""
        self._only_before_batches("batches")
        if samples is None and brings_data(self.config):
            raise UserError("engine.batches: give a dataset, or a job with data.source")
        if samples is not None and not brings_data(self.config):
            raise UserError(
                "engine.batches: the program has a dataset, and the job a data.source; leave one out"
            )
        if samples is not None and not (
            hasattr(samples.dataset, "__len__") and hasattr(samples.dataset, "__getitem__")
        ):
            raise UserError(
                f"engine.batches: {type(samples.dataset).__name__} has no __len__ and __getitem__; give a "
                "map-style dataset, whose samples can be read in any order"
            )
        if global_batch is not None:
            self.request.train["global_batch"] = global_batch
        if samples is not None:
            samples = replace(samples, seed=self.config.train.seed)
        self.request.samples, self.request.steps, self.request.epochs = samples, steps, epochs
        return self._batches()

    def _only_before_batches(self, call: str) -> None:
        if self._loop_begun:
            again = (
                "; one loop makes all steps, also of several epochs (epochs=3)" if call == "batches" else ""
            )
            raise UserError(f"engine.{call} comes before the loop over engine.batches(...){again}")

    # The loop's side

    def begin(self) -> Request:
        """Run the program up to its first batch, and return what it has asked for."""
        self._turns.resume()
        if not self._loop_begun:
            raise UserError(
                f"{self.address}: the program ended before its first batch; call engine.prepare(...), then "
                "loop over engine.batches(...)"
            )
        if not self.request.prepared:
            raise UserError(
                f"{self.address}: the program has no model; call engine.prepare(...) before its loop"
            )
        return self.request

    def filled(self) -> Config:
        """Return the job with what the program has asked for. Values that the job gives stay."""
        config, request = self.config, self.request
        update: dict[str, Any] = {}
        if request.optimizer is not None and not config.optimizer.model_fields_set:
            update["optimizer"] = _optimizer(request.optimizer)
        if request.samples is not None:
            update["data"] = _updated(config.data, {"sequence_length": 1, "held_out": 0.0})
        given = config.train.model_fields_set
        train = _updated(
            config.train, {key: value for key, value in request.train.items() if key not in given}
        )
        if "steps" not in given and (steps := self._steps(train.global_batch)) is not None:
            train = _updated(train, {"steps": steps})
        return config.model_copy(update={**update, "train": train})

    def _steps(self, global_batch: int) -> int | None:
        """Return the number of steps that the program asks for; None: the job decides."""
        request = self.request
        if request.steps is not None or request.samples is None:
            return request.steps
        size = len(request.samples.dataset)
        if size < global_batch:
            raise UserError(
                f"engine.batches: the dataset has {counted(size, 'sample')}, fewer than a global batch of "
                f"{global_batch}; give a smaller global_batch, or steps=… to read samples several times in a "
                "step"
            )
        return max(1, math.floor((request.epochs or 1.0) * size / global_batch))

    def bind(self, training: Training) -> None:
        """Let the program train with this team."""
        from shardwise.train.sources import RankRows

        self.training = training
        config, plan, samples = training.config, training.plan, self.request.samples
        if samples is None:
            self._reader = RankRows(training)
            return
        self._reader = SampleReader(
            samples,
            global_batch=config.train.global_batch,
            rows=training.shares.of(training.mesh.data_index),
            micro_batches=plan.accumulation,
            device=training.mesh.device,
            seen=training.sequences,
            dtype=DTYPES[plan.model.dtypes.compute],
        )

    def next_gradients(self) -> Drawn:
        """Let the program compute the gradients of the next step, and return them."""
        self._resume()
        assert self._drawn is not None, "the program waits in optim_step"
        return self._drawn

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

    def gradients_again(self) -> Drawn:
        """Compute the gradients of the present step once more."""
        assert self._call is not None, "the step has been computed"
        return replace(self._computed(*self._call), clip=self._drawn.clip if self._drawn else None)

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
        self._drawn = self._batch = None
        self._resume()
        return self.take_logged()

    def saved_state(self) -> Tensor:
        """Return the program's values as bytes."""
        buffer = io.BytesIO()
        try:
            torch.save(self.state, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise UserError(
                f"engine.state: cannot be saved: {str(error).splitlines()[0]}; keep numbers, texts, "
                "tensors, and lists and dictionaries of them"
            ) from None
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def load_state(self, saved: Tensor) -> None:
        """Replace the program's values by saved ones."""
        values = torch.load(io.BytesIO(bytes(saved.numpy())), weights_only=True)
        self.state.clear()
        self.state.update(values)

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
        self._reader = None

    # The program's side

    def present(self) -> Training:
        """Return the training of this team."""
        if self.training is None:
            raise UserError(
                "the engine knows its workers and steps inside the loop over engine.batches(...) only"
            )
        return self.training

    def _batches(self) -> Iterator[StepBatch]:
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
        assert self._reader is not None, "the program has a team"
        if isinstance(self._reader, SampleReader):
            with self.present().comm.clock.span("data"):
                return StepBatch(next(self._reader))
        return StepBatch(self._reader.next_batch())

    def forward_backward(self, loss: LossFunction, batch: StepBatch) -> Metrics:
        """Compute the gradients of a batch."""
        training = self.present()
        if not isinstance(batch, StepBatch):
            raise UserError(
                f"engine.forward_backward: the batch is a {type(batch).__name__}; give one of engine.batches"
            )
        if self._drawn is not None:
            raise UserError(
                f"step {training.step + 1}: engine.forward_backward was called twice. A step has one batch; "
                "return several losses as a dictionary, and call engine.optim_step() between two batches"
            )
        if batch is not self._batch:
            raise UserError(f"step {training.step + 1}: engine.forward_backward got a batch of another step")
        samples, first = self.request.samples, training.step == 0 and self._call is None
        self._call, self._metrics = (loss, batch), Metrics()
        if first and samples is not None and self.config.model.is_of_program:
            check_program_loss(training, loss, samples)
        self._drawn = self._computed(loss, batch)
        return self._metrics

    def _computed(self, loss: LossFunction, batch: StepBatch) -> Drawn:
        from shardwise.train.step_gradients import Drawn, ProgramSums

        training, parts = self.present(), batch.micro_batches
        if loss is next_token_loss and not self.config.model.is_of_program:
            return self._computed_by_job(batch)
        if not self.config.model.is_of_program:
            raise UserError(
                "engine.prepare() without a function trains the model of the job, whose loss is "
                "shardwise.next_token_loss; to use another loss, give engine.prepare a function that makes "
                "the model"
            )
        rows, sums = training.config.train.global_batch, LossSums()
        calls = [LossCall(loss, _values(part), part.first, sums) for part in parts]
        dtype = DTYPES[training.plan.model.dtypes.sums]
        factor = torch.tensor(training.scale.value / rows, dtype=dtype, device=training.mesh.device)
        with training.comm.clock.span("forward_backward"), attention_backends(training.mesh.device.type):
            total = training.parallel.forward_backward(calls, factor) / rows
        names = tuple(sorted(sums.parts))
        self._check_names(names)
        items = torch.as_tensor(sums.items, dtype=torch.float64, device=training.mesh.device)
        numbers = torch.stack([items, *(sums.parts[name] for name in names)]) / rows
        tokens = torch.tensor(float(rows), device=training.mesh.device)
        return Drawn(total, tokens, self._checksum(batch), program=ProgramSums(names, numbers))

    def _check_names(self, names: tuple[str, ...]) -> None:
        """Raise if the ranks have losses of other names, whose sums would be mixed up."""
        if names == self._names:
            return
        training, self._names = self.present(), names
        point = f"losses {training.step} {names}"
        if training.mesh.missing_at(point, AGREE_SECONDS):
            raise UserError(
                f"step {training.step + 1}: the loss function returned {', '.join(names)} on worker "
                f"{training.mesh.worker.rank}, and other names on another one. Return the same names for "
                "every batch, with a loss of 0 * … where one does not apply"
            )

    def _computed_by_job(self, batch: StepBatch) -> Drawn:
        """Compute the gradients of the job's model and data, as a run without a program does."""
        from shardwise.train.sources import RankRows

        assert isinstance(self._reader, RankRows), "the data are those of the job"
        return replace(self._reader.gradients(list(batch.micro_batches)), clip=None)  # type: ignore[arg-type]

    def _checksum(self, batch: StepBatch) -> int:
        """Return the checksum of this rank's samples; 0 on ranks that read the same ones as another."""
        mesh = self.present().mesh
        reports = mesh.coordinate("pipeline") == mesh.coordinate("context") == 0
        return sum(part.checksum for part in batch.micro_batches) if reports else 0

    def clip_grad_norm(self, limit: float) -> None:
        """Limit the norm of the gradients of this step."""
        if self._drawn is None:
            raise UserError(
                "engine.clip_grad_norm comes after engine.forward_backward and before engine.optim_step"
            )
        if not limit > 0:
            raise UserError(f"engine.clip_grad_norm({limit}): the largest norm must be above 0")
        self._drawn = replace(self._drawn, clip=float(limit))

    def optim_step(self) -> Metrics:
        """Make the step, and return its numbers."""
        training = self.present()
        if self._drawn is None:
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
        self._logged |= {name: float(value) for name, value in values.items()}

    @torch.no_grad()
    def evaluate(self, function: LossFunction, samples: Samples) -> dict[str, float]:
        """Return means over a whole dataset."""
        training = self.present()
        if self._drawn is not None:
            raise UserError(
                "engine.evaluate comes after engine.optim_step, and not between it and forward_backward"
            )
        if not self.config.model.is_of_program:
            raise UserError(
                "engine.evaluate: is for a model that engine.prepare makes; set train.evaluate_every"
            )
        if not len(samples.dataset):
            raise UserError("engine.evaluate: the dataset is empty")
        self._agree("engine.evaluate")
        if self.link is not None:
            self.link.progress("evaluate", training.step)
        sums = LossSums()
        with attention_backends(training.mesh.device.type), training.parallel.evaluating():
            for values, weight in self._parts_of(samples):
                own = LossSums()
                training.parallel.loss(LossCall(function, values, 0, own))
                sums.add({name: part * weight for name, part in own.parts.items()}, own.items * weight)
        names = sorted(sums.parts)
        self._agree(f"engine.evaluate with results {', '.join(names)}")
        items = torch.as_tensor(sums.items, dtype=torch.float64, device=training.mesh.device)
        numbers = training.comm.sum_over_data(torch.stack([items, *(sums.parts[name] for name in names)]))
        total, *means = numbers.tolist()
        training.comm.ledger.take()  # the next step does not count this time
        training.comm.clock.restart()
        if self.link is not None:
            self.link.progress("step", training.step)
        return {name: mean / (total or 1.0) for name, mean in zip(names, means, strict=True)}

    def _parts_of(self, samples: Samples) -> Iterator[tuple[Any, float]]:
        """Yield this device's batches of a dataset, with weight 1; and with weight 0 as many more as another
        device may have, because all devices make the same number of forwards."""
        training, count = self.present(), len(samples.dataset)
        size, collate = training.plan.micro_batch, samples.collate or default_collate
        dtype = DTYPES[training.plan.model.dtypes.compute]
        for first in range(0, count, size * training.plan.layout.data_parallel):
            start = first + training.mesh.data_index * size
            chosen = range(start, min(start + size, count)) or range(count - 1, count)
            values = collate([samples.dataset[index] for index in chosen])
            yield to_device(values, training.mesh.device, dtype), float(start < count)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the optimizer's state by name."""
        training = self.present()
        parameters = dict(training.parallel.named_parameters())
        states = training.optimizer.state
        return {
            "model": {**parameters, **dict(training.parallel.named_buffers())},
            "optimizer": {name: dict(states[each]) for name, each in parameters.items() if each in states},
        }

    @torch.no_grad()
    def export(self, path: str) -> None:
        """Write whole weights and buffers to a file, on the main rank."""
        training = self.present()
        self._agree("engine.export")
        tensors = {}
        named = [
            each
            for part in training.parallel.parts
            for each in part.model.named_parameters(remove_duplicate=False)
        ]
        for name, tensor in (*named, *training.parallel.named_buffers()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if training.mesh.is_main:
                tensors[name] = whole.detach().cpu().contiguous().clone()
        if training.mesh.is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path)


def _with_table(module: Any, sharding: object) -> Any:
    """Return the module with its sharding table."""
    if sharding is not None and isinstance(module, nn.Module):
        vars(module)["sharding"] = sharding
    return module


def _values(part: MicroBatch | Batch) -> Any:
    """Return what a loss function gets of a micro-batch."""
    if isinstance(part, MicroBatch):
        return part.values
    values: dict[str, Tensor] = {"inputs": part.inputs, "targets": part.targets}
    return values if part.documents is None else {**values, "documents": part.documents}


def _updated(table: Section, values: Mapping[str, Any]) -> Any:
    """Return a table of the job with these values, checked."""
    given = {key: getattr(table, key) for key in table.model_fields_set}
    with _checked():
        return type(table).model_validate({**given, **values})


def _optimizer(table: Mapping[str, object]) -> Any:
    """Return the optimizer that a program asks for, checked."""
    with _checked():
        return from_table(dict(table))


@contextmanager
def _checked() -> Iterator[None]:
    """Raise what is wrong with a table as messages."""
    try:
        yield
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError("what the program asks for", problems) from None
