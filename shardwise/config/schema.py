"""What a user may ask for: one frozen, typed section per table of the TOML file.

These definitions are the single source of truth. Reading, validation, `shardwise train --help` and
docs/configuration.md are all made from them, so a field is documented by its `description` here and nowhere
else. The table of a driver is defined in the driver's own file, and collected here from the registry of
drivers. No torch in this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from shardwise.codecs import parse_codec
from shardwise.config.compression import AUTO
from shardwise.config.dtype_names import Precision
from shardwise.config.schedules import DEFAULT_SCHEDULE, ScheduleName, names_in_words
from shardwise.drivers.registry import DRIVERS, drivers
from shardwise.optimizers import BUILT_IN, Optimizer, from_table
from shardwise.section import Degree, NonNegative, Positive, Section

Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "all-but-attention", "full"]
if TYPE_CHECKING:
    DriverName = str
else:
    DriverName = Literal[tuple(DRIVERS)]

SPELLINGS = {
    "layout": {
        "pp": "pipeline",
        "dp_replicate": "replica",
        "dp_shard": "data",
        "dp": "data",
        "cp": "context",
        "tp": "tensor",
        "ep": "expert",
    },
    "checkpoint": {"async": "background"},
}
"""By section, keys as other libraries spell them, and ours."""

LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 1.0, 4.0
"""Of Llama 3.1's rotary scaling: how many waves in the original length are slowed by all of it, and how many
by nothing."""

# Beyond all that is trained today by a factor of a hundred or more, and small enough that every sum and every
# search ends.
MOST_DEVICES = 2**20
Width = Annotated[int, Field(ge=1, le=2**24)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=4096)]
Length = Annotated[int, Field(ge=1, le=2**32)]
Experts = Annotated[int, Field(ge=0, le=2**16)]


class Model(Section):
    """The transformer. A preset gives every field; fields given beside it replace the preset's."""

    preset: str | None = Field(
        None, description="a named shape, for example `llama3-8b`; listed in docs/configuration.md"
    )
    pretrained: str | None = Field(
        None,
        min_length=1,
        description="a Hugging Face folder to start from: its weights, and its shape, its tokenizer and its "
        "end of documents, "
        "which the job need not say (docs/checkpoints.md)",
    )
    module: str | None = Field(
        None,
        description="your own `nn.Module` in place of the transformer, as `file.py:Class` (docs/sharding.md)",
    )
    layers: Layers = Field(2, description="transformer blocks")
    hidden: Width = Field(128, description="width of the residual stream")
    heads: Degree = Field(4, description="query heads")
    kv_heads: Degree = Field(
        4, description="key and value heads; fewer than `heads` is grouped-query attention"
    )
    head_dim: Width = Field(32, description="width of one head")
    ffn: Width = Field(512, description="inner width of the feed-forward layer")
    vocabulary: Width = Field(257, description="number of token ids; the byte tokenizer needs 257")
    norm: Literal["rms", "layer", "rms+1"] = Field(
        "rms",
        description="RMSNorm (Llama, Qwen), LayerNorm with bias (GPT), or RMSNorm that scales by 1 + weight "
        "(Gemma)",
    )
    post_norms: bool = Field(
        False, description="a second norm in each block after attention and after the feed-forward (Gemma 2)"
    )
    norm_epsilon: float = Field(1e-5, gt=0, description="added to the variance in every norm")
    positions: Literal["rotary", "learned"] = Field(
        "rotary", description="rotary embedding or a learned table"
    )
    max_positions: Length = Field(
        2048, description="longest sequence: rows of the learned table, limit of rotary"
    )
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scale: float = Field(1.0, ge=1, description="Llama 3.1 frequency scaling factor; 1 is off")
    rope_original: Length = Field(
        8192, description="sequence length the unscaled rotary frequencies were trained for"
    )
    window: Length | None = Field(
        None,
        description="tokens that a token sees at most, itself and those just before it (Mistral); left out: "
        "all before it",
    )
    window_layers: Literal["all", "even"] = Field(
        "all", description="the blocks that have the window: all, or every second from the first on (Gemma 2)"
    )
    qk_norm: bool = Field(False, description="RMSNorm over each query and key head (Qwen 3)")
    query_scalar: float | None = Field(
        None,
        gt=0,
        description="scores are divided by the square root of this (Gemma 2); left out: `head_dim`",
    )
    attention_softcap: float | None = Field(
        None,
        gt=0,
        description="scores of attention are kept within ± this by a tanh (Gemma 2), which no fused kernel "
        "does; left out: not",
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="logits are kept within ± this by a tanh (Gemma 2); left out: they are not"
    )
    activation: Literal["swiglu", "gelu", "geglu"] = Field(
        "swiglu", description="gated SiLU, tanh-approximated GELU, or gated by that GELU (Gemma)"
    )
    bias: bool | Literal["qkv"] = Field(
        False,
        description="biases in the attention and feed-forward projections; `qkv`: of queries, keys and "
        "values alone (Qwen 2)",
    )
    scaled_embedding: bool = Field(
        False, description="multiply embedded tokens by the square root of `hidden` (Gemma)"
    )
    tied: bool = Field(False, description="use the embedding matrix as the output head")
    experts: Experts = Field(
        0, description="experts in each block, of which a token visits a few; 0: a dense layer"
    )
    experts_per_token: Experts = Field(0, description="experts that each token visits")
    expert_ffn: Width | None = Field(None, description="inner width of one expert; left out: `ffn`")
    shared_experts: Experts = Field(0, description="experts that every token visits, beside the chosen ones")
    router: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="how an expert's score is made from the router's logit"
    )
    normalise_routing: bool = Field(
        True, description="scale the weights of a token's chosen experts so that they sum to 1"
    )
    routing_scale: float = Field(1.0, gt=0, description="factor on the weights of the chosen experts")
    balance_loss: float = Field(
        0.0,
        ge=0,
        description="coefficient of the loss that evens out the experts' load within each sequence; 0: none",
    )
    balance_bias: float = Field(
        0.0,
        ge=0,
        description="step by which an overloaded expert is made less likely to be chosen, without a loss; "
        "0: none",
    )
    router_z_loss: float = Field(
        0.0, ge=0, description="coefficient of the loss that keeps the router's logits small; 0: none"
    )

    def settings(self) -> dict[str, Any]:
        """Every setting of the model itself, without where they came from."""
        return self.model_dump(exclude={"preset", "pretrained"})

    def sees(self, layer: int, sequence_length: int) -> int:
        """How many tokens the last one of a sequence sees in a block."""
        windowed = self.window is not None and (self.window_layers == "all" or layer % 2 == 0)
        return min(sequence_length, self.window) if windowed and self.window else sequence_length

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate beside its inner features."""
        return self.activation in ("swiglu", "geglu")

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn or self.ffn


class Source(Section):
    """One of several text sources, mixed by weight."""

    path: str = Field(description="a file, a folder, a glob, or a folder made by `shardwise data prepare`")
    weight: float = Field(
        1.0, gt=0, description="share of the training sequences, relative to the other sources"
    )


class Data(Section):
    """What to train on."""

    source: str | None = Field(
        None,
        description="a text, JSONL or Parquet file, a folder or glob of them, or prepared shards; of records "
        "with `messages`, or "
        "with `prompt` and `completion`, the answers are learnt (docs/fine-tuning.md)",
    )
    sources: tuple[Source, ...] = Field(
        (),
        description="several sources with weights, instead of `source`",
        examples=[[{"path": "a.txt", "weight": 2.0}, {"path": "b.jsonl"}]],
    )
    tokenizer: str = Field("bytes", description="`bytes`, or the path of a Hugging Face tokenizer.json")
    end_of_document: str | None = Field(
        None,
        description="the token that closes each document; left out: the first of the usual ones that the "
        "tokenizer has",
    )
    text_field: str = Field(
        "text", description="the column holding the text in JSONL, Parquet and Arrow files"
    )
    sequence_length: Length = Field(256, description="tokens a sequence")
    held_out: float = Field(
        0.05, ge=0, lt=1, description="share of the sequences kept for evaluation, never trained on"
    )
    reset_attention: bool = Field(
        False,
        description="tokens see only their own document, and no loss is taken across a document boundary; "
        "conversations are "
        "always kept apart so",
    )
    cache: str = Field(
        ".shardwise/data",
        min_length=1,
        description="where sources that are not prepared yet are tokenised to",
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("sources"), list):
            values = {**values, "sources": tuple(values["sources"])}
        return values


class Train(Section):
    """How to train."""

    driver: DriverName = Field(
        "synchronous",
        description="how devices work together. "
        + "; ".join(f"`{driver.name}`: {driver.summary}" for driver in drivers())
        + ". See docs/asynchronous.md",
    )
    steps: Positive = Field(100, description="optimizer steps")
    global_batch: Batch = Field(32, description="sequences an optimizer step sees, over all devices")
    micro_batch: Positive | None = Field(
        None,
        description="sequences one forward sees on one device; left out: planned where the job names a "
        "cluster or no layout, "
        "else the device's whole share",
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
        description="largest global gradient norm; `false` for none. With the optimizer `1bit-adam`, once "
        "compression begins, the largest norm of summed momenta",
    )
    precision: Precision = Field(
        "float32",
        description="dtype of the computation; weights stay in `state_dtype`. float8: products in 8 bits, "
        "the rest as in "
        "bfloat16; see docs/precision.md",
    )
    float8_scaling: Literal["delayed", "dynamic"] = Field(
        "delayed",
        description="scales of float8 tensors: from the steps before, the same on every layout, or from the "
        "tensor itself",
    )
    float8_head: bool = Field(True, description="in float8, the products of the output head too")
    float8_leave_out: tuple[str, ...] = Field(
        (),
        description='modules whose products stay in bfloat16, with * for any text: `["blocks.0.*", '
        '"*.attention.*"]`',
        examples=[["blocks.0.*", "*.attention.*"]],
    )
    state_dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto",
        description="dtype of weights and optimizer state; auto: float32, or float64 with float64 precision; "
        "bfloat16 is half "
        "as large, rounded by chance, and noisier",
    )
    initial_scale: float = Field(65536.0, gt=0, description="first loss scale of float16")
    scale_every: Positive = Field(2000, description="clean steps after which the float16 loss scale doubles")
    recompute: Recompute | float = Field(
        "none",
        description="activations recomputed in backward: `none`, `selective` (keeps matmul and attention "
        "outputs), "
        "`all-but-attention` (keeps attention outputs), `full`, or a number from 0 (recompute all) to 1 "
        "(keep all)",
    )
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile each block; auto: on GPUs")
    deterministic: bool = Field(
        False,
        description="on GPUs: only kernels that add in one order, so that a run repeats to the last bit; "
        "CPUs always do",
    )
    evaluate_every: NonNegative = Field(
        0, description="steps between evaluations on the held-out split; 0: only at the end"
    )
    evaluate_sequences: Positive = Field(256, description="held-out sequences an evaluation reads, at most")
    check_every: NonNegative = Field(
        0,
        description="steps between checks that copies of weights agree and every parameter got a gradient; "
        "0: never",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="decides the weights and the order of the data")

    @model_validator(mode="before")
    @classmethod
    def _friendly_values(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            if values.get("clip") is False:
                values["clip"] = None
            lists = {
                name: tuple(values[name])
                for name in ("float8_leave_out",)
                if isinstance(values.get(name), list)
            }
            values |= lists
        return values


class Layout(Section):
    """Who computes what. `replica x data` is the data-parallel size; states are sharded over `data`."""

    pipeline: Degree = Field(1, description="pipeline stages")
    replica: Degree = Field(1, description="copies of the sharded model (hybrid sharding)")
    data: Annotated[int, Field(ge=-1, le=2**20)] = Field(
        -1,
        description="data-parallel devices that share sharded states; -1: the rest of the devices, "
        "which are two where a job writes it and has neither GPUs nor other axes",
    )
    context: Degree = Field(1, description="devices that split one sequence")
    tensor: Degree = Field(1, description="devices that split each matrix")
    expert: Degree = Field(
        1, description="devices that split the experts, borrowed from data, context and tensor"
    )
    zero: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="what is sharded over `data`: 0 nothing, 1 optimizer state, 2 and gradients, 3 and "
        "weights; "
        "left out: 3 where `replica` is above 1, else chosen by memory",
    )
    schedule: ScheduleName = Field(
        DEFAULT_SCHEDULE,
        description="order of the pipeline's work: see docs/pipelines.md; "
        f"{names_in_words(lambda facts: facts.splits_backward)} split backward",
    )
    stages_per_rank: Degree | None = Field(
        None,
        description="pipeline stages a device holds; left out: 2 for "
        f"{names_in_words(lambda facts: facts.stages_per_rank == 2)}, else 1",
    )
    stages: tuple[Degree, ...] | None = Field(
        None,
        description="blocks of each pipeline stage, by hand; left out: cut so that the slowest stage is as "
        "fast as can be",
        examples=[[2, 2]],
    )
    attention: Literal["auto", "ring", "ulysses"] = Field(
        "auto",
        description="how `context` devices attend: a ring, or all-to-all over heads; auto: ulysses where "
        "heads divide",
    )
    offload: bool = Field(
        False,
        description="keep weights, gradients and optimizer state in host memory between uses (GPUs; not with "
        "zero = 0)",
    )
    compression: str | None = Field(
        None,
        description="how gradients are compressed between devices, which changes the numbers: `bfloat16`, "
        "`float16`, `float8`, `int8`, "
        "`int4`, `qsgd(4)`, `terngrad`, `sign`, `topk(0.01)`, `randomk(0.01)`, `powersgd(4)`; `auto`: as the "
        "planner chooses, perhaps not at all; see docs/compression.md",
    )
    compression_axes: Literal["all", "replica"] = Field(
        "all",
        description="which sums are compressed: all over data-parallel devices, or those between "
        "replicas alone",
    )
    compression_warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps before compression begins")
    weight_compression: str | None = Field(
        None,
        description="how sharded weights are compressed when they are gathered, which changes the numbers: "
        "`int8`, `float8` or "
        "`int4`; see docs/compression.md",
    )
    backward_shards: Positive | None = Field(
        None,
        description="zero = 3: so many neighbours (the devices of a node, say) keep a copy of the weights "
        "among them from "
        "forward to backward, and backward gathers from that; left out: no copy",
    )
    error_feedback: bool | None = Field(
        None,
        description="whether what a codec leaves out is added to the next gradient; left out: yes, but for "
        "`terngrad` and "
        "`qsgd(2)`, whose errors exceed the gradient and average out instead. With `sign`, use the optimizer "
        "`1bit-adam`",
    )

    @model_validator(mode="before")
    @classmethod
    def _peer_spellings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("stages"), list):
            values = {**values, "stages": tuple(values["stages"])}
        axes = [str(SPELLINGS["layout"].get(key, key)) for key in values]
        if twice := {axis for axis in axes if axes.count(axis) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} is given twice, under two spellings; keep one")
        return dict(zip(axes, values.values(), strict=True))

    @field_validator("compression", "weight_compression")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        return value if value in (None, AUTO) else str(parse_codec(value))

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (devices := self.fixed * max(self.data, 1)) > MOST_DEVICES:
            raise ValueError(f"{devices} devices; at most {MOST_DEVICES} can be planned for")
        return self

    @property
    def fixed(self) -> int:
        """Devices used by every axis but `data`."""
        return self.pipeline * self.replica * self.context * self.tensor

    @property
    def world(self) -> int:
        """Devices in all; only when `data` is a number."""
        assert self.data > 0, "resolve the layout first"
        return self.fixed * self.data

    @property
    def shards(self) -> int:
        """Devices that share sharded states: those that hold the same weights and read different tokens, in
        one replica."""
        return self.data * self.context

    @property
    def data_parallel(self) -> int:
        """Devices (or groups of devices) that read different sequences."""
        return self.replica * self.data


class ClusterSection(Section):
    """What the job runs on, for the planner. Left out: this machine, measured once."""

    preset: str | None = Field(
        None,
        description="a named cluster, with a number of devices: `h100x64`; the names are in docs/planner.md",
    )
    file: str | None = Field(
        None, description="a cluster file, as `shardwise probe` writes it, instead of a preset"
    )
    devices: Degree | None = Field(
        None, description="devices to plan for; left out: all that the preset or the file names"
    )
    margin: float = Field(0.08, ge=0, lt=1, description="share of a device's memory that a plan leaves free")


class Checkpoint(Section):
    """When to save, where, and what to start from."""

    every: NonNegative = Field(0, description="steps between saves; 0: as often as `every_minutes` says")
    every_minutes: float = Field(
        15.0,
        ge=0,
        description="minutes between saves where `every` is 0; 0: only at the end and when asked to stop",
    )
    keep: Positive = Field(2, description="newest checkpoints kept")
    keep_every: NonNegative = Field(
        0, description="also keep, for good, each checkpoint whose step this divides; 0: none"
    )
    max_failed_saves: NonNegative = Field(
        10,
        description="failed saves in a row (a full disk, say) after which the run stops and says why; 0: it "
        "never stops for them",
    )
    background: bool = Field(
        True,
        description="go on training while a checkpoint is written, after one copy in host memory (`async` is "
        "accepted too)",
    )
    folder: str | None = Field(
        None,
        description="a folder or any address fsspec knows, such as `s3://bucket/run`; left out: "
        "`checkpoints` in run.folder",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="`auto`: the newest in the run folder, if any; `never`; or the path of a checkpoint",
    )

    @model_validator(mode="before")
    @classmethod
    def _peer_spelling(cls, values: Any) -> Any:
        if isinstance(values, dict) and "async" in values:
            if "background" in values:
                raise ValueError("background is given twice, once as async; keep one")
            values = {("background" if key == "async" else key): value for key, value in values.items()}
        return values


class Recovery(Section):
    """What to do when workers fail. Who may join is asked on the command line: --min-workers,
    --max-workers."""

    step_attempts: Positive = Field(
        3, description="failures of the same step in a row after which the run stops and says why"
    )
    hang_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="seconds without a step done that count as a hang; left out: 30 times the usual step, at "
        "least 60",
    )
    start_seconds: float = Field(
        1800.0, gt=0, description="seconds until the first step is done that count as a hang"
    )
    copies: NonNegative = Field(
        0,
        description="steps between copies of each device's state in a neighbour's memory, to recover without "
        "storage; 0: none",
    )
    straggler: float = Field(
        1.5,
        gt=1,
        description="a device that needs this many times the median time for its own work, for a while, "
        "is named",
    )


class Observe(Section):
    """What to show and keep."""

    tensorboard: bool = Field(
        False, description="write TensorBoard event files (needs the `tensorboard` extra)"
    )
    wandb: str | None = Field(
        None, description="Weights & Biases project to log to (needs the `wandb` extra)"
    )
    sample: str | None = Field(
        None, description="text that the trained model continues at the end of the run"
    )
    sample_tokens: Positive = Field(200, description="length of that continuation")
    trace: NonNegative = Field(
        0,
        description="write a timeline of so many steps after the first; on GPUs, torch's profile of them; "
        "0: none",
    )


class Run(Section):
    """Where it runs, and where results go."""

    folder: str = Field(
        "runs/default",
        min_length=1,
        description="config, plan, metrics, logs and checkpoints of the run; left out: `runs/NAME` for a job "
        "file NAME.toml",
    )
    device: Device = Field(
        "auto",
        description="what workers compute on; auto: a GPU each where there are as many, else the CPU; "
        "cuda: GPUs, shared where there are fewer",
    )


def _named_optimizer(value: Any) -> Any:
    """Return the optimizer that a table names; a value that is no table is left to pydantic."""
    return from_table(value) if isinstance(value, dict) else value


class _TablesOfEveryJob(Section):
    """The tables that do not belong to a driver."""

    model: Model = Field(default_factory=Model, description="the transformer")  # type: ignore[arg-type]
    data: Data = Field(default_factory=Data, description="what to train on")  # type: ignore[arg-type]
    train: Train = Field(default_factory=Train, description="how to train")  # type: ignore[arg-type]
    optimizer: Annotated[SerializeAsAny[Optimizer], BeforeValidator(_named_optimizer)] = Field(
        default_factory=lambda: from_table({}), description="how weights are updated"
    )
    layout: Layout = Field(default_factory=Layout, description="who computes what; left out: chosen")  # type: ignore[arg-type]
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,  # type: ignore[arg-type]
        description="what it runs on; left out: this machine",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="saving and resuming")  # type: ignore[arg-type]
    recovery: Recovery = Field(default_factory=Recovery, description="surviving failures")  # type: ignore[arg-type]
    observe: Observe = Field(default_factory=Observe, description="what to show and keep")  # type: ignore[arg-type]
    run: Run = Field(default_factory=Run, description="on what it runs, and where results go")  # type: ignore[arg-type]


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
"""By its name, the definition of each table of a job."""


def keys_of(section: str) -> dict[str, FieldInfo]:
    """Return the keys that a table of a job may have. Those of [optimizer] are the keys of all our
    optimizers: which of them a job may write depends on the one that it names."""
    if section != "optimizer":
        return SECTIONS[section].model_fields
    keys: dict[str, FieldInfo] = {}
    for kind in BUILT_IN.values():
        keys = {**kind.model_fields, **keys}  # the first that has a key describes it
    return keys
