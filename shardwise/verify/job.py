"""What a proof runs: the job on its own number of devices, made small if need be, in the dtype of the proof.

Left as in training: model, layout, data order, micro-batches, recomputation, optimizer, clipping. Changed,
because it would only make the proof weaker or slower: the schedule is that of a run which ends just after the
proof's steps (in a long warm-up the learning rate is near zero, so that no weight would move and a wrong
update would go unseen; here it rises and falls), blocks are not compiled, and everything runs on CPU
processes. On GPUs, where that is asked for (`run.device`), blocks are compiled if the job says so; the
reference is one CPU process all the same. Between the rows of the job's data are others, made to reach what
its text may never (verify/rows.py); the loss is cut into a few chunks of tokens, as only large jobs have it,
and on one device into none; and a global batch and one row more are evaluated on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.config import Config, Layout, fewest_devices, with_nearby_that_divides
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.drivers.registry import driver_of
from shardwise.errors import UserError
from shardwise.plan import ModelSpec, Plan, choose
from shardwise.verify.shrink import shrink

Dtype = Literal["float64", "float32", "bfloat16"]
ROUNDING: dict[Dtype, float] = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""The spacing of numbers just above 1."""
ALLOWANCE = 8.0
"""In a short dtype, how many times one device's own rounding error a layout may be off by."""
CHUNKS = 3
"""Of the loss, for a micro-batch of more than a few tokens; the last is shorter."""


_WEIGHTS = ("weight_compression",)


@dataclass(frozen=True)
class ProofJob:
    """A job as the processes run it: on its layout, and on one device."""

    config: Config
    plan: Plan
    steps: int
    dtype: Dtype
    ids: int
    """Of tokens: the model takes those from 0 to one below this."""
    parts: int
    """Into which the layout's tensor devices cut them; on one device too, so that its rows are the same."""
    chunk: int | None = None
    """Tokens of the loss at a time; None: all."""
    compressed: tuple[Layout, ...] = ()
    """The layout with each compression that the job asks for, one at a time."""
    uneven: bool = False
    """Whether devices get uneven shares of the batch."""

    @property
    def world(self) -> int:
        """Processes that the layout takes."""
        return self.plan.layout.world

    def on_one_device(self, dtype: Dtype) -> ProofJob:
        """The reference: no layout, and each global batch in one piece, so that accumulation is proven
        too."""
        layout = Layout(data=1)  # type: ignore[call-arg]
        train = {**_train(self.config, self.steps, dtype), "micro_batch": None}
        run = self.config.run
        if dtype == "float64":  # the truth, which owes nothing to a GPU
            train["compile"], run = False, run.model_copy(update={"device": "cpu"})
        config = self.config.model_copy(
            update={"layout": layout, "train": self.config.train.model_copy(update=train), "run": run},
        )
        return replace(self, config=config, plan=choose(config, 1), dtype=dtype, chunk=None)

    def with_compression(self, layout: Layout) -> ProofJob:
        """The same on a layout with compression, in float64."""
        job = self.in_dtype("float64")
        config = job.config.model_copy(update={"layout": layout})
        return replace(job, config=config, plan=choose(config, self.world))

    def in_dtype(self, dtype: Dtype) -> ProofJob:
        """The same layout in another dtype, module by module: not compiled."""
        train = self.config.train.model_copy(
            update={**_train(self.config, self.steps, dtype), "compile": False}
        )
        config = self.config.model_copy(update={"train": train})
        plan = replace(self.plan, model=ModelSpec.of(config), compile=False)
        return replace(self, config=config, plan=plan, dtype=dtype)


def prepare_proof(config: Config, steps: int, dtype: Dtype) -> tuple[ProofJob, dict[str, Any] | None]:
    """The proof of a job, and what was shrunk for it: (before, after) by key; None: nothing."""
    driver = driver_of(config)
    if not driver.lockstep:
        raise UserError(
            f"train.driver = {config.train.driver!r}: a proof is of a layout whose devices compute in "
            f"lockstep; "
            "add train.driver=synchronous, and leave the driver's own table out"
        )
    if config.train.precision == "float8" and dtype == "float32":
        raise UserError(
            "--dtype float32: products in float8 are between numbers in bfloat16, or in float64; use one "
            "of these"
        )
    model = config.model.model_copy(
        update={"pretrained": None}
    )  # weights are drawn: a proof is of computing, not of what they know
    small, shrunk = shrink(config.model_copy(update={"model": model}))
    data = smallest_data(small.layout)
    layout = with_nearby_that_divides(small.layout, data).model_copy(update={"data": data, "offload": False})
    asked, usual = layout.model_copy(update={"compression_warmup": 0}), Layout()  # type: ignore[call-arg]
    layout = asked.model_copy(update=usual.model_dump(include={*SETTINGS, *_WEIGHTS}))
    compressed = tuple(
        layout.model_copy(update=asked.model_dump(include=set(fields)))
        for name, fields in (("compression", SETTINGS), ("weight_compression", _WEIGHTS))
        if getattr(asked, name) not in (None, AUTO)
    )
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


def smallest_data(layout: Layout) -> int:
    """The data axis: as given, or where it is left open, what the experts need; two where no other axis is
    there to prove."""
    if layout.data > 0:
        return layout.data
    return max(fewest_devices(layout) // layout.fixed, 2 if layout.fixed == 1 else 1)


def _train(config: Config, steps: int, dtype: Dtype) -> dict[str, Any]:
    train = config.train
    float8 = train.precision == "float8"
    state = train.state_dtype if dtype == "bfloat16" and train.state_dtype == "bfloat16" else "auto"
    return {
        "precision": "float8" if float8 else dtype,  # between values in the dtype of the proof
        "state_dtype": "float64" if float8 and dtype == "float64" else state,
        "float8_scaling": "delayed",  # dynamic scales depend on who has which tokens
        "steps": steps + 1,
        "warmup": min(train.warmup, 2 if steps > 2 else 0),
        "decay": 2,
        "compile": train.compile is True and config.run.device == "cuda",
        "check_every": 0,
        "driver": "synchronous",  # uneven rows are given to devices as a whole (verify/measure.py)
        "evaluate_sequences": min(train.evaluate_sequences, train.global_batch + 1),
    }


Against = Literal["one-device", "plain"]
"""What a layout is held against: this code on one device, or verify/plain.py."""

Sabotage = Literal["drop-all-reduce", "scale-gradient", "swap-chunks", "misroute-token"]
"""What verify/sabotage.py can break."""


SCALE = 1.01
"""What scale-gradient multiplies by."""


def check_sabotage(kind: Sabotage, proof: ProofJob) -> None:
    """A layout without what is to be broken cannot be sabotaged so."""
    model = proof.config.model
    if kind == "scale-gradient" and ALLOWANCE * ROUNDING[proof.dtype] > SCALE - 1:
        raise UserError(
            f"--sabotage scale-gradient: a gradient that is off by {(SCALE - 1) * 100:.0f} % is within what "
            f"rounding to "
            f"{proof.dtype} may cost; use --dtype float64"
        )
    if kind == "drop-all-reduce" and proof.world == 1:
        raise UserError(
            "--sabotage drop-all-reduce: one device sums over nobody; give a layout, for example "
            "layout.data=2"
        )
    if kind == "misroute-token" and model.experts <= model.experts_per_token:
        raise UserError(
            f"--sabotage misroute-token: the model has {model.experts} experts and a token visits "
            f"{model.experts_per_token}, so "
            "none is wrong; it needs a model with more experts than a token visits, for example "
            "model.preset=moe-tiny"
        )
    if kind == "swap-chunks" and proof.config.data.sequence_length // proof.plan.layout.context < 2:
        raise UserError(
            "--sabotage swap-chunks: a device has one token of a sequence; give a longer data.sequence_length"
        )
