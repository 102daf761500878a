"""The table `[model]` of a job: the shape of the transformer, or where a model comes from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.section import Degree, Section

LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 1.0, 4.0
"""Llama 3.1's rotary scaling: a wave that fits less often than the first into the original length is slowed
fully, and one that fits more often than the second not at all."""

# Beyond all that is trained today by a factor of a hundred or more, and small enough that every sum and every
# search ends.
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
