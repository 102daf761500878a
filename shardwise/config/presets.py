"""Named model shapes. Their parameter counts equal the published ones (tests/config/test_parameters.py)."""

from __future__ import annotations

from shardwise.files import Json

_LLAMA = {
    "norm_epsilon": 1e-5,
    "rope_theta": 500000.0,
    "vocabulary": 128256,
    "max_positions": 131072,
    "head_dim": 128,
}
_QWEN = {"norm_epsilon": 1e-6, "rope_theta": 1000000.0, "vocabulary": 151936, "max_positions": 40960,
         "qk_norm": True, "head_dim": 128, "kv_heads": 8}  # fmt: skip
_QWEN2 = {
    "norm_epsilon": 1e-6,
    "rope_theta": 1000000.0,
    "max_positions": 32768,
    "bias": "qkv",
    "qk_norm": False,
}
_GEMMA2 = {"norm": "rms+1", "norm_epsilon": 1e-6, "post_norms": True, "activation": "geglu",
           "scaled_embedding": True, "tied": True, "head_dim": 256, "query_scalar": 256.0,
           "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "window_layers": "even",
           "rope_theta": 10000.0, "vocabulary": 256000, "max_positions": 8192}  # fmt: skip
_GPT = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True,
        "vocabulary": 50257, "max_positions": 1024}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> Json:
    return {**_LLAMA, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn, **more}


def _qwen(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> Json:
    return {**_QWEN, "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, **more}


def _gpt(layers: int, hidden: int, heads: int, **more: object) -> Json:
    return {**_GPT, **_shape(layers, hidden, heads, heads, 4 * hidden), **more}


def _bytes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Json:
    """Return a small shape for the byte tokenizer: for laptops, tests and first steps."""
    shape = _shape(layers, hidden, heads, kv_heads, ffn)
    return {**shape, "vocabulary": 257, "max_positions": 2048, "tied": False}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Json:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn": ffn,
    }


def _experts(shape: Json, experts: int, per_token: int, **more: object) -> Json:
    """Return the shape with a mixture of experts in every block.

    The softmax over all experts, renormalised over the chosen ones, equals Mixtral's over the chosen logits.
    """
    return {**shape, "experts": experts, "experts_per_token": per_token, "normalise_routing": True, **more}


_SCALED = {"rope_scale": 8.0, "rope_original": 8192}  # Llama 3.1
_SMALL = {"rope_scale": 32.0, "rope_original": 8192, "tied": True}  # Llama 3.2
_MIXTRAL = {"vocabulary": 32000, "rope_theta": 1000000.0, "max_positions": 32768}

PRESETS: dict[str, Json] = {
    "bytes-400k": _bytes(2, 128, 4, 2, 336),
    "bytes-2m": _bytes(4, 192, 6, 2, 512),
    "bytes-10m": _bytes(6, 384, 6, 6, 1024),
    "moe-tiny": _experts(_bytes(4, 64, 4, 2, 128), 8, 2, balance_loss=1.0),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, max_positions=2048),
    "llama3-1b": _llama(16, 2048, 32, 8192, head_dim=64, **_SMALL),
    "llama3-3b": _llama(28, 3072, 24, 8192, **_SMALL),
    "llama3-8b": _llama(32, 4096, 32, 14336, **_SCALED),
    "llama3-70b": _llama(80, 8192, 64, 28672, **_SCALED),
    "llama3-405b": _llama(126, 16384, 128, 53248, **_SCALED),
    "mixtral-8x7b": _experts(_llama(32, 4096, 32, 14336, **_MIXTRAL), 8, 2, balance_loss=0.01),
    "gemma2-2b": {**_GEMMA2, "layers": 26, "hidden": 2304, "heads": 8, "kv_heads": 4, "ffn": 9216},
    "gemma2-9b": {**_GEMMA2, "layers": 42, "hidden": 3584, "heads": 16, "kv_heads": 8, "ffn": 14336},
    "mistral-7b": _llama(
        32, 4096, 32, 14336, vocabulary=32000, rope_theta=10000.0, max_positions=32768, window=4096
    ),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 4864, kv_heads=2, head_dim=64, tied=True, **_QWEN2),
    "qwen2.5-1.5b": _qwen(28, 1536, 12, 8960, kv_heads=2, tied=True, **_QWEN2),
    "qwen3-0.6b": _qwen(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen(36, 4096, 32, 12288),
    "qwen3-14b": _qwen(40, 5120, 40, 17408),
    "qwen3-32b": _qwen(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _experts(
        _qwen(48, 2048, 32, 6144, kv_heads=4), 128, 8, expert_ffn=768, balance_loss=0.001
    ),
}
