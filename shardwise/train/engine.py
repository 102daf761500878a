"""The engine: what a user's program calls to train.

Every worker runs the program, and each call below is made by all of them, in the same order. The work behind
the calls is that of the ordinary training loop (train/program.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.data.samples import Collate
from shardwise.data.streams import samples_of
from shardwise.errors import UserError
from shardwise.models.program_module import LossFunction
from shardwise.train.program_outputs import state_dict

if TYPE_CHECKING:
    from shardwise.train.program import Program
    from shardwise.train.program_values import Metrics, StepBatch


class Engine:
    """Trains a model in a program's own loop. shardwise makes the engine and calls the program with it."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def prepare(self, make: Callable[[], torch.nn.Module] | None = None, sharding: object = None) -> None:
        """Say which model to train.

        `make` is called without arguments and returns a `torch.nn.Module`. It is called several times, and
        makes a new module each time: to build the model without memory for its weights, and to give these
        their first values. `sharding` is
        the module's sharding table; without one the module is trained on data axes with any ZeRO stage. Left
        out: the model of the job.
        """
        self._program.request("prepare").prepare(make, sharding)

    def optimizer(
        self,
        name: str | type[torch.optim.Optimizer] = "adamw",
        lr: float | None = None,
        *,
        groups: Mapping[str, Mapping[str, float]] | None = None,
        **settings: object,
    ) -> None:
        """Say how weights are updated: by the optimizer of this name or this class, which must be
        element-wise, with this peak learning rate and its settings. The schedule of the learning rate is the
        job's ([train]).

        `groups` gives weights whose names match a pattern a learning rate and a weight decay of their own:
        `{"*.bias": {"weight_decay": 0.0}, "encoder.*": {"lr_factor": 0.1}}`.
        """
        self._program.request("optimizer").choose_optimizer(
            name, lr, settings if groups is None else {**settings, "groups": groups}
        )

    def batches(
        self,
        dataset: object = None,
        *,
        global_batch: int | None = None,
        collate: Collate | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        workers: int = 0,
        sequences: Sequence[str] = (),
    ) -> Iterator[StepBatch]:
        """Yield this worker's part of each global batch, from the step where the run stands to the last one.

        `dataset` has `__len__` and `__getitem__`, or only `__iter__`; left out, the data are those of the
        job. `collate` makes a batch of a list of samples, by default as torch's `DataLoader` does. The run
        makes `steps` steps, or passes `epochs` times through the data (1 by default). There is one loop over
        batches in a run, so this is called once. `workers` processes read ahead. `sequences` names the
        entries of a batch that are sequences in their dim 1: the devices of the context axis share them, and
        the batch gets the `positions` of a device's tokens.
        """
        samples = None
        if dataset is None:
            _check_no_dataset_settings(
                collate=collate, epochs=epochs, workers=workers, sequences=tuple(sequences)
            )
        if dataset is not None:
            samples = samples_of("engine.batches", dataset, collate, workers, tuple(sequences))
        self._program.request("batches").choose_data(samples, global_batch, steps, epochs)
        return self._program.batches()

    def forward_backward(self, loss: LossFunction, batch: StepBatch) -> Metrics:
        """Compute the gradients of a batch, micro-batch by micro-batch.

        `loss(model, values)` returns the loss summed over the items of a micro-batch, and their number. The
        gradient of the step is that of all sums together, divided by the number of all items. Several losses
        are a dictionary of sums, which are added; each is recorded under its name, which must not be that of
        another number of a step (`loss`, `items`, `seconds`).
        """
        return self._program.forward_backward(loss, batch)

    def clip_grad_norm(self, limit: float) -> None:
        """Scale the gradients of this step so that their global norm is at most `limit`."""
        self._program.clip_grad_norm(limit)

    def optim_step(self) -> Metrics:
        """Update the weights, record the step, and save if a checkpoint is due. Return the numbers of the
        step: `loss`, `gradient_norm`, `learning_rate`, `items`, and each named loss."""
        return self._program.optim_step()

    def evaluate(
        self, function: LossFunction, dataset: object, *, collate: Collate | None = None
    ) -> dict[str, float]:
        """Return the mean of what `function(model, values)` returns over a whole dataset, in eval mode and
        without gradients. The function is like that of `forward_backward`; its sums need not be losses."""
        return self._program.evaluate(function, samples_of("engine.evaluate", dataset, collate))

    def log(self, **values: float) -> None:
        """Record numbers with the step of the batch that the loop has now. Those of the main worker count."""
        self._program.log(values)

    def save(self) -> None:
        """Save a checkpoint with the next `optim_step`. The main worker's call counts."""
        self._program.asks_to_save = True

    @property
    def state(self) -> dict[str, Any]:
        """Values of the program's own, which are saved with each checkpoint: numbers, texts, tensors, numpy
        arrays, and lists and dictionaries of them. Set first values before the loop over `batches`: the
        values of the checkpoint that the run goes on from replace them when the loop begins. The main
        worker's are saved.
        """
        return self._program.state

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the optimizer's state by name, as tensors or DTensors that share memory with
        the run's. `torch.distributed.checkpoint.save` writes them."""
        return state_dict(self._program.present())

    def export(self, path: str) -> None:
        """Write all weights and buffers, whole and in the dtype in which they are stored, to a safetensors
        file. All workers call this."""
        self._program.export(path)

    def add_callback(self, callback: object) -> None:
        """Call methods of an object on the main worker: `on_step(record)` after each step, `on_save(event)`,
        `on_recovery(event)`, `on_end(event)` and those of other events. Methods that it does not have are not
        called. Add callbacks before the loop over `batches`."""
        self._program.request("add_callback").callbacks.append(callback)

    def stop(self) -> None:
        """End the run with the next `optim_step`, as if it were that of the last step. It is enough that one
        worker calls this; the loops of all workers end."""
        self._program.stop()

    @property
    def step(self) -> int:
        """Number of steps that the run has made."""
        return self._program.present().step

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self._program.present().mesh.worker.rank

    @property
    def world(self) -> int:
        """Return the number of workers of the run."""
        return self._program.present().mesh.worker.world

    @property
    def device(self) -> torch.device:
        """The device that this worker computes on."""
        return self._program.present().mesh.device


def _check_no_dataset_settings(**settings: object) -> None:
    """Raise if a program says how to read a dataset and gives none."""
    for name, value in settings.items():
        if value:
            raise UserError(
                f"engine.batches: {name}= is for a dataset of the program's own; leave it out"
                + (", or give steps=" if name == "epochs" else "")
            )
