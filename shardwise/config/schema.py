"""The settings of a job: one frozen, typed section per table of the TOML file.

These definitions are the only ones. Reading, validation, `shardwise train --help` and
docs/configuration.md are all made from them, so a field is documented by its `description` here and nowhere
else. The table of a driver is defined in the driver's own file, and collected here from the registry of
drivers. No torch in this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from shardwise.config.dtype_names import Precision
from shardwise.config.layout import SPELLINGS as LAYOUT_SPELLINGS
from shardwise.config.layout import Layout
from shardwise.config.machine import ClusterSection, Device, Recompute
from shardwise.config.model import Batch, Length, Model
from shardwise.drivers.registry import DRIVERS, drivers
from shardwise.optimizers import BUILT_IN, Optimizer, from_table
from shardwise.section import NonNegative, Positive, Section

if TYPE_CHECKING:
    DriverName = str
else:
    DriverName = Literal[tuple(DRIVERS)]

SPELLINGS = {
    "layout": LAYOUT_SPELLINGS,
    "checkpoint": {"async": "background"},
}
"""For each section, our keys by the names that other libraries use."""


class TextSource(Section):
    """One of several text sources, mixed by weight."""

    path: str = Field(description="a file, a folder, a glob, or a folder made by `shardwise data prepare`")
    weight: float = Field(
        1.0, gt=0, description="share of the training sequences, relative to the other sources"
    )


class Data(Section):
    """The training data, and how it is read."""

    source: str | None = Field(
        None,
        description="a text, JSONL or Parquet file, a folder or glob of them, or prepared shards; in records "
        "with `messages`, or with `prompt` and `completion`, only the answers have a loss "
        "(docs/fine-tuning.md)",
    )
    sources: tuple[TextSource, ...] = Field(
        (),
        description="several sources with weights, instead of `source`",
        examples=[[{"path": "a.txt", "weight": 2.0}, {"path": "b.jsonl"}]],
    )
    tokenizer: str = Field("bytes", description="`bytes`, or the path of a Hugging Face tokenizer.json")
    end_of_document: str | None = Field(
        None,
        description="the token that ends each document; left out: the first usual end token that the "
        "tokenizer has",
    )
    text_field: str = Field("text", description="the column of the text in JSONL, Parquet and Arrow files")
    sequence_length: Length = Field(256, description="tokens per sequence")
    held_out: float = Field(
        0.05, ge=0, lt=1, description="share of the sequences kept for evaluation, never trained on"
    )
    reset_attention: bool = Field(
        False,
        description="tokens attend only to their own document, and the loss skips document boundaries; "
        "conversations are always separated this way",
    )
    cache: str = Field(
        ".shardwise/data",
        min_length=1,
        description="folder for the tokens of sources that are not prepared yet",
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("sources"), list):
            values = {**values, "sources": tuple(values["sources"])}
        return values


class Train(Section):
    """The length, batch, learning rate and precision of training."""

    driver: DriverName = Field(
        "synchronous",
        description="how devices work together. "
        + "; ".join(f"`{driver.name}`: {driver.summary}" for driver in drivers())
        + ". See docs/asynchronous.md",
    )
    steps: Positive = Field(100, description="optimizer steps")
    global_batch: Batch = Field(32, description="sequences per optimizer step, over all devices")
    micro_batch: Positive | None = Field(
        None,
        description="sequences in one forward pass on one device; left out: planned if the job names a "
        "cluster or no layout, else the device's whole share of the batch",
    )
    learning_rate: float = Field(3e-4, gt=0, description="peak learning rate")
    final_learning_rate: float = Field(
        0.1, ge=0, le=1, description="learning rate at the last step, as a share of the peak"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="after warm-up: cosine, linear, warm-up-stable-decay, or constant"
    )
    warmup: NonNegative = Field(10, description="steps of linear warm-up")
    decay: Positive | None = Field(
        None, description="steps of the final decay of `wsd`; left out: a fifth of the run"
    )
    clip: float | None = Field(
        1.0,
        gt=0,
        description="largest global gradient norm; `false`: no clipping. With the optimizer `1bit-adam`, "
        "once compression begins, the largest norm of the summed momenta",
    )
    precision: Precision = Field(
        "float32",
        description="dtype of the computation; weights stay in `state_dtype`. float8: matrix products in 8 "
        "bits, the rest as in bfloat16; see docs/precision.md",
    )
    float8_scaling: Literal["delayed", "dynamic"] = Field(
        "delayed",
        description="how float8 tensors are scaled: by the maxima of earlier steps, the same on every "
        "layout, or by the tensor's own maximum",
    )
    float8_head: bool = Field(True, description="in float8, compute the output head in float8 too")
    float8_leave_out: tuple[str, ...] = Field(
        (),
        description='modules whose products stay in bfloat16, with * for any text: `["blocks.0.*", '
        '"*.attention.*"]`',
        examples=[["blocks.0.*", "*.attention.*"]],
    )
    state_dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto",
        description="dtype of weights and optimizer state; auto: float32, or float64 with float64 precision; "
        "bfloat16 takes half the memory and is rounded at random, which adds noise",
    )
    initial_scale: float = Field(65536.0, gt=0, description="first loss scale of float16")
    scale_every: Positive = Field(2000, description="clean steps after which the float16 loss scale doubles")
    recompute: Recompute | float = Field(
        "none",
        description="activations recomputed in backward: `none`, `selective` (keeps matmul and attention "
        "outputs), `all-but-attention` (keeps attention outputs), `full`, or a number from 0 (recompute all) "
        "to 1 (keep all)",
    )
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile each block; auto: on GPUs")
    deterministic: bool = Field(
        False,
        description="on GPUs: use only kernels that add in a fixed order, so that a run repeats to the last "
        "bit; CPUs always do",
    )
    evaluate_every: NonNegative = Field(
        0, description="steps between evaluations on the held-out split; 0: only at the end"
    )
    evaluate_sequences: Positive = Field(
        256, description="largest number of held-out sequences that an evaluation reads"
    )
    check_every: NonNegative = Field(
        0,
        description="steps between checks that copies of weights are equal and every parameter received a "
        "gradient; 0: never",
    )
    seed: int = Field(
        0, ge=0, le=2**63 - 1, description="seed of the initial weights and of the order of the data"
    )

    @model_validator(mode="before")
    @classmethod
    def _toml_values(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("clip") is False:
            values = {**values, "clip": None}
        if isinstance(values, dict) and isinstance(values.get("float8_leave_out"), list):
            values = {**values, "float8_leave_out": tuple(values["float8_leave_out"])}
        return values


class Checkpoint(Section):
    """When and where to save checkpoints, and which one to start from."""

    every: NonNegative = Field(0, description="steps between saves; 0: as often as `every_minutes` says")
    every_minutes: float = Field(
        15.0,
        ge=0,
        description="minutes between saves if `every` is 0; 0: only at the end and when asked to stop",
    )
    keep: Positive = Field(2, description="number of newest checkpoints that are kept")
    keep_every: NonNegative = Field(
        0, description="also keep each checkpoint whose step is a multiple of this number; 0: none"
    )
    max_failed_saves: NonNegative = Field(
        10,
        description="failed saves in a row (for example on a full disk) after which the run stops and says "
        "why; 0: the run never stops for them",
    )
    background: bool = Field(
        True,
        description="continue training while a checkpoint is written, after one copy to host memory (`async` "
        "is accepted too)",
    )
    folder: str | None = Field(
        None,
        description="a folder or any address that fsspec supports, such as `s3://bucket/run`; left out: "
        "`checkpoints` in run.folder",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="`auto`: continue from the newest in the run folder, if any; `never`: start from step "
        "0; or the path of a checkpoint to start from",
    )

    @model_validator(mode="before")
    @classmethod
    def _peer_spelling(cls, values: object) -> object:
        if isinstance(values, dict) and "async" in values:
            if "background" in values:
                raise ValueError("background is given twice, once as async; keep one")
            values = {("background" if key == "async" else key): value for key, value in values.items()}
        return values


class Recovery(Section):
    """What to do when workers fail. The options --min-workers and --max-workers decide who may join."""

    step_attempts: Positive = Field(
        3, description="failures of the same step in a row after which the run stops and says why"
    )
    hang_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="seconds without a completed step that count as a hang; left out: 30 times the usual "
        "step, at least 60",
    )
    start_seconds: float = Field(
        1800.0, gt=0, description="seconds without a completed first step that count as a hang"
    )
    copies: NonNegative = Field(
        0,
        description="steps between copies of each device's state in a neighbour's memory, to recover without "
        "storage; 0: none",
    )
    straggler: float = Field(
        1.5,
        gt=1,
        description="a device is reported if it takes this many times the median time for its own work, for "
        "a while",
    )


class Observe(Section):
    """What a run logs and shows."""

    tensorboard: bool = Field(
        False, description="write TensorBoard event files (needs the `tensorboard` extra)"
    )
    wandb: str | None = Field(
        None, description="Weights & Biases project to log to (needs the `wandb` extra)"
    )
    wandb_entity: str | None = Field(None, description="W&B team or user that the project belongs to")
    mlflow: str | None = Field(
        None,
        description="MLflow experiment to log to, at the server that MLFLOW_TRACKING_URI names (needs the "
        "`mlflow` extra)",
    )
    name: str | None = Field(
        None, description="name of the run in W&B and MLflow; left out: that of the run folder"
    )
    group: str | None = Field(None, description="group of runs that it belongs to in W&B and MLflow")
    tags: tuple[str, ...] = Field(
        (), description="labels of the run in W&B and MLflow", examples=[["baseline"]]
    )
    callbacks: tuple[str, ...] = Field(
        (),
        description="your own classes, as file.py:Class, whose methods are called on steps, evaluations, "
        "saves and at the end (docs/training.md)",
        examples=[["callbacks.py:Notify"]],
    )
    sample: str | None = Field(
        None, description="text that the trained model continues at the end of the run"
    )
    sample_tokens: Positive = Field(200, description="length of that continuation")
    trace: NonNegative = Field(
        0,
        description="number of steps after the first whose timeline is written (on GPUs, torch's profile); "
        "0: none",
    )

    @field_validator("tags", "callbacks", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class Run(Section):
    """The folder of the results, and the kind of device."""

    folder: str = Field(
        "runs/default",
        min_length=1,
        description="config, plan, metrics, logs and checkpoints of the run; left out: `runs/NAME` for a job "
        "file NAME.toml",
    )
    program: str | None = Field(
        None,
        description="your own training loop, as `file.py:function`, which is called with an engine "
        "(docs/library.md); without a table `[model]` it brings its own model, and without `data.source` its "
        "own data",
    )
    device: Device = Field(
        "auto",
        description="what workers compute on; auto: one GPU per worker if there are enough, else the CPU; "
        "cuda: GPUs, shared if there are fewer",
    )


def _named_optimizer(value: object) -> object:
    """Return the optimizer that a table names. pydantic judges a value that is not a table."""
    return from_table(value) if isinstance(value, dict) else value


class _TablesOfEveryJob(Section):
    """The tables that do not belong to a driver."""

    model: Model = Field(default_factory=Model, description="the transformer")  # type: ignore[arg-type]
    data: Data = Field(default_factory=Data, description="what to train on")  # type: ignore[arg-type]
    train: Train = Field(default_factory=Train, description="how to train")  # type: ignore[arg-type]
    optimizer: Annotated[SerializeAsAny[Optimizer], BeforeValidator(_named_optimizer)] = Field(
        default_factory=lambda: from_table({}), description="how weights are updated"
    )
    layout: Layout = Field(
        default_factory=Layout,  # type: ignore[arg-type]
        description="how devices share the work; left out: chosen",
    )
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,  # type: ignore[arg-type]
        description="the cluster to plan for; left out: this machine",
    )
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint,  # type: ignore[arg-type]
        description="saving and resuming",
    )
    recovery: Recovery = Field(
        default_factory=Recovery,  # type: ignore[arg-type]
        description="surviving failures",
    )
    observe: Observe = Field(
        default_factory=Observe,  # type: ignore[arg-type]
        description="what a run logs and shows",
    )
    run: Run = Field(
        default_factory=Run,  # type: ignore[arg-type]
        description="the folder of the results, and the kind of device",
    )


if TYPE_CHECKING:
    Config = _TablesOfEveryJob
else:
    Config = create_model(
        "Config",
        __base__=_TablesOfEveryJob,
        __module__=__name__,
        __doc__="A job: everything shardwise needs to know to train a model.",
        **{
            driver.name: (
                driver.settings,
                Field(default_factory=driver.settings, description=driver.settings_summary),
            )
            for driver in drivers()
            if driver.settings is not None
        },
    )

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type)
}
"""The definition of each table of a job, by its name."""


def keys_of(section: str) -> dict[str, FieldInfo]:
    """Return the keys that a table of a job may have; for [optimizer], those of all our optimizers."""
    if section != "optimizer":
        return SECTIONS[section].model_fields
    keys: dict[str, FieldInfo] = {}
    for kind in BUILT_IN.values():
        keys = {**kind.model_fields, **keys}  # the first that has a key describes it
    return keys


def brings_data(config: Config) -> bool:
    """Return whether the data are those of the job's program."""
    return config.run.program is not None and config.data.source is None and not config.data.sources
