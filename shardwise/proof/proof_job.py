"""The job that a proof runs: on its own number of devices, made small if needed, in the dtype of the proof.

Model, layout, data order, micro-batches, recomputation, optimizer and clipping stay as in training. What
would only make the proof weaker or slower is changed. The learning-rate schedule is that of a run which ends
just after the steps of the proof: in a long warm-up the learning rate is near zero, so no weight would move
and a wrong update would not be seen. Blocks are not compiled, and everything runs in CPU processes. If GPUs
are requested (`run.device`), blocks are compiled if the job says so; the reference is still one CPU process.

Three things are added. Every other row of data is generated to reach cases that the job's text may never
reach (proof/proof_rows.py). The loss of the layout is cut into a few chunks of tokens, as in large jobs, and
that of one device is not. The evaluation reads one row more than a global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import Config, Layout, with_dividing_backward_shards
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.drivers.registry import driver_of
from shardwise.errors import UserError
from shardwise.files import Json
from shardwise.plans import ModelSpec, Plan, choose
from shardwise.proof.shrink import Changes, shrink, with_smallest_data

Dtype = Literal["float64", "float32", "bfloat16"]
ROUNDING: dict[Dtype, float] = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance between 1 and the next larger number of each dtype."""
ALLOWANCE = 8.0
"""Largest error of a layout in a dtype shorter than float64, as a multiple of one device's rounding error."""
Against = Literal["one-device", "plain"]
"""What a layout is compared with: this code on one device, or proof/plain_torch.py."""
Sabotage = Literal["drop-all-reduce", "scale-gradient", "swap-chunks", "misroute-token"]
"""Kinds of faults that proof/sabotage.py can inject."""
SCALE = 1.01
"""Factor by which scale-gradient multiplies a gradient."""
CHUNKS = 3
"""Number of chunks of the loss for a micro-batch of more than a few tokens; the last chunk is shorter."""
_WEIGHTS = ("weight_compression",)
"""Settings of the layout that belong to the compression of weights."""


@dataclass(frozen=True)
class ProofJob:
    """A job as the processes of a proof run it, on its layout or on one device."""

    config: Config
    plan: Plan
    steps: int
    dtype: Dtype
    ids: int
    """Number of token ids that the model accepts, counted from 0."""
    parts: int
    """Number of parts into which the layout's tensor devices split the ids. It is the same on one device, so
    that the generated rows are the same."""
    chunk: int | None = None
    """Number of tokens in a chunk of the loss; None means that there is one chunk."""
    compressed: tuple[Layout, ...] = ()
    """Copies of the layout, each with one of the compressions that the job asks for."""
    uneven: bool = False
    """Whether devices get different numbers of rows of the batch."""

    @property
    def world(self) -> int:
        """Number of processes that the layout takes."""
        return self.plan.layout.world

    def on_one_device(self, dtype: Dtype) -> ProofJob:
        """Return the job of the reference: one device, and each global batch in one piece, so that gradient
        accumulation is proven too."""
        layout = Layout(data=1)  # type: ignore[call-arg]
        train = {**_train(self.config, self.steps, dtype), "micro_batch": None}
        run = self.config.run
        if dtype == "float64":  # the reference must not depend on a GPU
            train["compile"], run = False, run.model_copy(update={"device": "cpu"})
        config = self.config.model_copy(
            update={"layout": layout, "train": self.config.train.model_copy(update=train), "run": run},
        )
        return replace(self, config=config, plan=choose(config, 1), dtype=dtype, chunk=None)

    def with_compression(self, layout: Layout) -> ProofJob:
        """Return the same job in float64 on a layout with compression."""
        job = self.in_dtype("float64")
        config = job.config.model_copy(update={"layout": layout})
        return replace(job, config=config, plan=choose(config, self.world))

    def in_dtype(self, dtype: Dtype) -> ProofJob:
        """Return the same job in another dtype, without compilation, so that modules can be compared one by
        one."""
        train = self.config.train.model_copy(
            update={**_train(self.config, self.steps, dtype), "compile": False}
        )
        config = self.config.model_copy(update={"train": train})
        plan = replace(self.plan, model=ModelSpec.of(config), compile=False)
        return replace(self, config=config, plan=plan, dtype=dtype)


def prepare_proof(config: Config, steps: int, dtype: Dtype) -> tuple[ProofJob, Changes | None]:
    """Return the job of the proof, and the (before, after) values by key of what was shrunk; None if nothing
    was."""
    driver = driver_of(config)
    if not driver.lockstep:
        raise UserError(
            f"train.driver = {config.train.driver!r}: a proof is of a layout whose devices compute in "
            f"lockstep; add train.driver=synchronous, and leave the driver's own table out"
        )
    if config.train.precision == "float8" and dtype == "float32":
        raise UserError(
            "--dtype float32: products in float8 are between numbers in bfloat16, or in float64; use one of "
            "these"
        )
    # Weights are initialised at random: a proof is about the computation, not about trained values.
    model = config.model.model_copy(update={"pretrained": None})
    small, shrunk = shrink(config.model_copy(update={"model": model}))
    layout = with_smallest_data(small)
    layout = with_dividing_backward_shards(layout, layout.data).model_copy(update={"offload": False})
    layout, compressed = _split_compression(layout)
    run = small.run.model_copy(update={"device": "cuda" if small.run.device == "cuda" else "cpu"})
    small = small.model_copy(
        update={
            "layout": layout,
            "train": small.train.model_copy(update=_train(small, steps, dtype)),
            "optimizer": small.optimizer.without_compression(),
            "run": run,
        }
    )
    plan, uneven = choose(small, layout.world), driver.varies_rows
    chunk = plan.micro_batch * small.data.sequence_length // layout.context // CHUNKS + 1
    return ProofJob(
        small, plan, steps, dtype, small.model.vocabulary, layout.tensor, chunk, compressed, uneven
    ), shrunk


def _split_compression(layout: Layout) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layout without compression, and one layout for each compression that it asks for."""
    compressing = layout.model_copy(update={"compression_warmup": 0})
    defaults = Layout()  # type: ignore[call-arg]
    exact = compressing.model_copy(update=defaults.model_dump(include={*SETTINGS, *_WEIGHTS}))
    compressed = tuple(
        exact.model_copy(update=compressing.model_dump(include=set(fields)))
        for name, fields in (("compression", SETTINGS), ("weight_compression", _WEIGHTS))
        if getattr(compressing, name) not in (None, AUTO)
    )
    return exact, compressed


def _train(config: Config, steps: int, dtype: Dtype) -> Json:
    train = config.train
    float8 = train.precision == "float8"
    state = train.state_dtype if dtype == "bfloat16" and train.state_dtype == "bfloat16" else "auto"
    return {
        "precision": "float8" if float8 else dtype,  # between values in the dtype of the proof
        "state_dtype": "float64" if float8 and dtype == "float64" else state,
        "float8_scaling": "delayed",  # dynamic scales depend on which device has which tokens
        "steps": steps + 1,
        "warmup": min(train.warmup, 2 if steps > 2 else 0),
        "decay": 2,
        "compile": train.compile is True and config.run.device == "cuda",
        "check_every": 0,
        "driver": "synchronous",  # uneven rows are given to devices as a whole (proof/compare_layout.py)
        "evaluate_sequences": min(train.evaluate_sequences, train.global_batch + 1),
    }


def check_sabotage(kind: Sabotage, proof: ProofJob) -> None:
    """Refuse a kind of sabotage that the layout or the model has nothing to break for."""
    model = proof.config.model
    if kind == "scale-gradient" and ALLOWANCE * ROUNDING[proof.dtype] > SCALE - 1:
        raise UserError(
            f"--sabotage scale-gradient: a gradient that is off by {(SCALE - 1) * 100:.0f} % is within what "
            f"rounding to {proof.dtype} may cost; use --dtype float64"
        )
    if kind == "drop-all-reduce" and proof.world == 1:
        raise UserError(
            "--sabotage drop-all-reduce: one device has no sums over devices; give a layout, for example "
            "layout.data=2"
        )
    if kind == "misroute-token" and model.experts <= model.experts_per_token:
        raise UserError(
            f"--sabotage misroute-token: the model has {model.experts} experts and a token visits "
            f"{model.experts_per_token}, so none is wrong; it needs a model with more experts than a token "
            f"visits, for example model.preset=moe-tiny"
        )
    if kind == "swap-chunks" and proof.config.data.sequence_length // proof.plan.layout.context < 2:
        raise UserError(
            "--sabotage swap-chunks: a device has one token of a sequence; give a longer data.sequence_length"
        )
