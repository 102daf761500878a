"""The table `[model]` of a job: the shape of the transformer, or where a model comes from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.files import Json
from shardwise.section import Degree, Section

PROGRAM = "program"
"""Value of `model.module` where a program (`run.program`) prepares its own module."""
LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 1.0, 4.0
"""Limits of Llama 3.1's rotary scaling: a frequency with fewer periods in the original length than the first
is scaled fully, and one with more than the second not at all."""

# The limits exceed what is trained today, and are small enough for every sum and every search to end.
Width = Annotated[int, Field(ge=1, le=2**24)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=4096)]
Length = Annotated[int, Field(ge=1, le=2**32)]
Experts = Annotated[int, Field(ge=0, le=2**16)]


class Model(Section):
    """The transformer. A preset sets every field; fields given beside it replace those of the preset."""

    preset: str | None = Field(
        None, description="a named shape, for example `llama3-8b`; listed in docs/configuration.md"
    )
    pretrained: str | None = Field(
        None,
        min_length=1,
        description="a Hugging Face folder to start from: its weights, shape, tokenizer and end-of-document "
        "token, which the job need not repeat (docs/checkpoints.md)",
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
        False,
        description="a second norm in each block after attention and after the feed-forward layer (Gemma 2)",
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
        description="maximum number of tokens that a token attends to, itself included (Mistral); left out: "
        "all tokens before it",
    )
    window_layers: Literal["all", "even"] = Field(
        "all",
        description="blocks that have the window: all, or every second block beginning with the first (Gemma "
        "2)",
    )
    qk_norm: bool = Field(False, description="RMSNorm over each query and key head (Qwen 3)")
    query_scalar: float | None = Field(
        None,
        gt=0,
        description="attention scores are divided by the square root of this number (Gemma 2); left out: "
        "`head_dim`",
    )
    attention_softcap: float | None = Field(
        None,
        gt=0,
        description="limit of attention scores, applied with tanh (Gemma 2); no fused kernel supports it; "
        "left out: no limit",
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="limit of logits, applied with tanh (Gemma 2); left out: no limit"
    )
    activation: Literal["swiglu", "gelu", "geglu"] = Field(
        "swiglu", description="gated SiLU, tanh-approximated GELU, or gated tanh-approximated GELU (Gemma)"
    )
    bias: bool | Literal["qkv"] = Field(
        False,
        description="biases in the attention and feed-forward projections; `qkv`: only of queries, keys and "
        "values (Qwen 2)",
    )
    scaled_embedding: bool = Field(
        False, description="multiply embedded tokens by the square root of `hidden` (Gemma)"
    )
    tied: bool = Field(False, description="use the embedding matrix as the output head")
    experts: Experts = Field(
        0, description="experts in each block, of which each token visits a few; 0: a dense layer"
    )
    experts_per_token: Experts = Field(0, description="experts that each token visits")
    expert_ffn: Width | None = Field(None, description="inner width of one expert; left out: `ffn`")
    shared_experts: Experts = Field(0, description="experts that every token visits, beside the chosen ones")
    router: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="function that turns the router's logits into scores"
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
        description="step by which the selection bias of an overloaded expert is lowered, without a loss; 0: "
        "none",
    )
    router_z_loss: float = Field(
        0.0, ge=0, description="coefficient of the loss that keeps the router's logits small; 0: none"
    )

    @property
    def is_of_program(self) -> bool:
        """Whether a program prepares the module, so that no size of the table applies to it."""
        return self.module == PROGRAM

    def settings(self) -> Json:
        """Return every setting of the model itself, without the source it came from."""
        return self.model_dump(exclude={"preset", "pretrained"})

    def window_of(self, layer: int) -> int | None:
        """Return the attention window of a block; None: it has none."""
        return self.window if self.window_layers == "all" or layer % 2 == 0 else None

    def visible_tokens(self, layer: int, sequence_length: int) -> int:
        """Return how many tokens the last token of a sequence attends to in a block."""
        return min(sequence_length, self.window_of(layer) or sequence_length)

    def window_cuts(self, sequence_length: int) -> bool:
        """Return whether a window hides some tokens of a sequence of this length, in any block."""
        layers = range(min(2, self.layers))
        return any(self.visible_tokens(layer, sequence_length) < sequence_length for layer in layers)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies its inner features by a gate."""
        return self.activation in ("swiglu", "geglu")

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn or self.ffn
