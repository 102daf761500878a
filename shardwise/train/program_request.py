"""What a program asks for before its first batch: a model, an optimizer and data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from torch import nn

from shardwise.config import Config, brings_data
from shardwise.data.samples import Samples
from shardwise.data.streams import Stream
from shardwise.errors import ConfigError, UserError, shown
from shardwise.models import build_program_module, use_factory, weights_without_memory
from shardwise.optimizers import Optimizer, address_of, from_table
from shardwise.parallel.expert import expert_modules
from shardwise.parallel.tables import table_of
from shardwise.plurals import counted
from shardwise.section import Section

ASKED = "what the program asks for"
"""Source of a table's values, for messages."""
SECOND_LOOP = (
    "engine.batches was called twice. A run has one loop over batches, which makes all its steps: put "
    "several datasets into one, for example torch.utils.data.StackDataset(first=…, second=…), and for "
    "several epochs say engine.batches(..., epochs=3)"
)
"""Message for a second call before the first loop is over."""


class Request:
    """What a program asks for. Values that the job gives go before these."""

    def __init__(self, config: Config) -> None:
        self.config = config
        """The job, without what the program asks for."""
        self.prepared = False
        self.samples: Samples | None = None
        """The program's own data; None: those of the job."""
        self.callbacks: list[object] = []
        """Objects whose methods are called on steps and events."""
        self._optimizer: dict[str, Any] | None = None
        """Table [optimizer]; None: that of the job."""
        self._train: dict[str, Any] = {}
        """Values of [train]."""
        self._length: tuple[int | None, float | None] | None = None
        """Numbers of steps and of epochs; None: the program has not asked for data yet."""

    def prepare(self, make: Callable[[], nn.Module] | None, sharding: object) -> None:
        """Let `make` make the model, with a sharding table or none."""
        if isinstance(make, nn.Module) or (make is not None and not callable(make)):
            raise UserError(
                f"engine.prepare: got a {type(make).__name__}; give the function that makes the model, as in "
                "engine.prepare(make_model) or engine.prepare(lambda: Model(64))"
            )
        if self.prepared:
            raise UserError(
                "engine.prepare was called twice; several models are one module with several parts, for "
                "example nn.ModuleDict"
            )
        if make is not None:
            _check_no_arguments(make)
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
        self.prepared = True
        if make is not None:
            use_factory(lambda: _with_table(make(), sharding))

    def choose_optimizer(self, name: object, lr: float | None, settings: Mapping[str, object]) -> None:
        """Use this optimizer, by its name or its class, with this peak learning rate."""
        if self._optimizer is not None:
            raise UserError(
                "engine.optimizer was called twice; a run has one optimizer, in which some weights can have "
                "settings of their own: engine.optimizer(..., groups={'encoder.*': {'lr_factor': 0.1}})"
            )
        if not isinstance(name, str):
            name = address_of(name)
        self._optimizer = {"name": name, **settings}
        if lr is not None:
            self._train["learning_rate"] = lr

    def choose_data(
        self, samples: Samples | None, global_batch: int | None, steps: int | None, epochs: float | None
    ) -> None:
        """Train on these samples, or on the data of the job."""
        if self._length is not None:
            raise UserError(SECOND_LOOP)
        _check_length(steps, epochs)
        if samples is None and brings_data(self.config):
            raise UserError("engine.batches: give a dataset, or a job with data.source")
        if samples is not None and not brings_data(self.config):
            raise UserError(
                "engine.batches: the program has a dataset, and the job a data.source; leave one out"
            )
        if samples is not None:
            _check_samples(samples, steps is not None or "steps" in self.config.train.model_fields_set)
            samples = replace(samples, seed=self.config.train.seed)
        if global_batch is not None:
            self._train["global_batch"] = global_batch
        self.samples, self._length = samples, (steps, epochs)

    def filled(self) -> Config:
        """Return the job with what the program has asked for. Values that the job gives stay."""
        config = self.config
        update: dict[str, Any] = {"optimizer": self._filled_optimizer()}
        if self.samples is not None:
            update["data"] = _updated(config.data, {"sequence_length": 1, "held_out": 0.0})
        if config.model.is_of_program:
            update["model"] = _updated(config.model, _sizes(config.layout.expert > 1))
        if config.layout.context > 1 and self.samples is not None:
            if not self.samples.sequences:
                raise UserError(
                    f"layout.context = {config.layout.context}: it is not known which parts of a batch are "
                    'sequences; name them, as in engine.batches(..., sequences=("inputs", "targets"))'
                )
            if config.layout.attention == "auto":
                update["layout"] = _updated(config.layout, {"attention": "ring"})
        given = config.train.model_fields_set
        train = _updated(config.train, {key: value for key, value in self._train.items() if key not in given})
        if "steps" not in given and (steps := self._steps(train.global_batch)) is not None:
            train = _updated(train, {"steps": steps})
        return config.model_copy(update={**update, "train": train})

    def _filled_optimizer(self) -> Optimizer:
        """Return the program's optimizer, with the keys that the job gives; or that of the job, if the
        program has none or the job names another one."""
        asked, job = self._optimizer, self.config.optimizer
        if asked is None or ("name" in job.model_fields_set and job.name != asked["name"]):
            return job
        given = {key: getattr(job, key) for key in job.model_fields_set}
        with _checked(f"{ASKED}, with the job's [optimizer]," if given else ASKED):
            return from_table({**asked, **given})

    def _steps(self, global_batch: int) -> int | None:
        """Return the number of steps that the program asks for; None: the job decides."""
        assert self._length is not None, "the program has asked for data"
        steps, epochs = self._length
        if steps is not None or self.samples is None:
            return steps
        size = self.samples.count()
        if size < global_batch:
            raise UserError(
                f"engine.batches: the dataset has {counted(size, 'sample')}, fewer than a global batch of "
                f"{global_batch}; give a smaller global_batch, or steps=… to read samples several times in a "
                "step"
            )
        return max(1, math.floor((1.0 if epochs is None else epochs) * size / global_batch))


def _check_no_arguments(make: Callable[[], nn.Module]) -> None:
    """Raise if a function that makes a model needs arguments."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # not known, for example of some functions in C
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UserError(
            f"engine.prepare: {name} is called without arguments, and {error}; give it its arguments, as in "
            f"engine.prepare(lambda: {name}(64))"
        ) from None


def _check_length(steps: int | None, epochs: float | None) -> None:
    """Raise if a run cannot be this long."""
    if epochs is None:
        return
    if steps is not None:
        raise UserError(
            f"engine.batches: steps={shown(steps)} and epochs={shown(epochs)} both say how long to train; "
            "leave one out"
        )
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise UserError(
            f"engine.batches: epochs={shown(epochs)}: give how often to read the dataset, a number above 0, "
            "for example epochs=1"
        )


def _check_samples(samples: Samples, steps_are_known: bool) -> None:
    """Raise if a dataset cannot be read as a program asks."""
    kind, workers = type(samples.dataset).__name__, samples.workers
    if not isinstance(workers, int) or workers < 0:
        raise UserError(
            f"engine.batches: workers={shown(workers)}: give the number of processes that read ahead, 0 or "
            "more"
        )
    if not isinstance(samples, Stream):
        if not samples.count():
            raise UserError(f"engine.batches: the dataset is empty: {kind} has no samples")
        return
    if not steps_are_known:
        raise UserError(f"engine.batches: {kind} is only iterated over; say how long to train with steps=…")
    if workers:
        raise UserError(
            f"engine.batches: workers={workers} read by number, and {kind} is only iterated over; leave "
            "workers out, or give the dataset __len__ and __getitem__"
        )


def _sizes(needs_experts: bool) -> dict[str, int]:
    """Return the sizes of the program's module that its sharding table names: the number of blocks, which
    pipeline stages share, and that of experts, which the devices of the expert axis share. `needs_experts`:
    name their number also if there are none.
    """
    with weights_without_memory(0):
        module = build_program_module()
    sizes, table = {}, table_of(module)
    if table.blocks is not None:
        sizes["layers"] = len(list(module.get_submodule(table.blocks).children()))
    numbers = [
        weight.shape[0]
        for experts in expert_modules(module, table)
        for weight in experts.parameters()
        if weight.ndim
    ]
    if numbers or needs_experts:
        sizes["experts"] = math.gcd(*numbers)  # the expert axis must divide each
    return sizes


def _with_table(module: Any, sharding: object) -> Any:
    """Return the module with its sharding table."""
    if sharding is not None and isinstance(module, nn.Module):
        vars(module)["sharding"] = sharding
    return module


def _updated(table: Section, values: Mapping[str, Any]) -> Any:
    """Return a table of the job with these values, checked."""
    given = {key: getattr(table, key) for key in table.model_fields_set}
    with _checked():
        return type(table).model_validate({**given, **values})


@contextmanager
def _checked(what: str = ASKED) -> Iterator[None]:
    """Raise what is wrong with a table as messages. `what` says where its values are from."""
    try:
        yield
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(what, problems) from None
