"""Hugging Face folders, in both directions, with the transformers library as the oracle: the same logits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.folder import Manifest, saved_model
from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.checkpoint.pretrained import import_folder
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, write_checkpoint
from shardwise.config import Model
from shardwise.models import Transformer

transformers = pytest.importorskip("transformers")

TINY = {
    "layers": 2,
    "hidden": 48,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 10,
    "ffn": 76,
    "vocabulary": 101,
    "max_positions": 64,
}
SCALED = {"rope_theta": 5000.0, "rope_scale": 8.0, "rope_original": 16}
LEARNED = {
    "norm": "layer",
    "positions": "learned",
    "activation": "gelu",
    "bias": True,
    "kv_heads": 6,
    "head_dim": 8,
}
GEMMA2 = {"norm": "rms+1", "post_norms": True, "activation": "geglu", "scaled_embedding": True, "tied": True,
"query_scalar": 7.0,
          "attention_softcap": 3.0, "logit_softcap": 2.0, "window": 7, "window_layers": "even",
          "layers": 3}  # fmt: skip
MIXTURE = {"experts": 5, "experts_per_token": 2}
OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied and scaled": {**SCALED, "tied": True},
    "llama with biases": {"bias": True, "kv_heads": 6},
    "qwen3": {"qk_norm": True, "norm_epsilon": 1e-6, "rope_theta": 1e6},
    "qwen3 tied": {"qk_norm": True, "tied": True, **SCALED},
    "qwen2": {"bias": "qkv", "norm_epsilon": 1e-6, "tied": True},
    "qwen2 with a window": {"bias": "qkv", "window": 7},
    "mistral": {"window": 7, "head_dim": 8},
    "mistral with a window that is never reached": {"window": 64},
    "gemma2": GEMMA2,
    "gemma2 without caps": {
        **GEMMA2,
        "attention_softcap": None,
        "logit_softcap": None,
        "tied": False,
        "window": 64,
    },
    "gpt2": {**LEARNED, "tied": True},
    "gpt2 untied": LEARNED,
    "mixtral": MIXTURE,
    "mixtral tied": {**MIXTURE, "tied": True, "experts_per_token": 3, "expert_ffn": 36, "balance_loss": 0.01},
    "qwen3 moe": {**MIXTURE, "qk_norm": True, "expert_ffn": 20, "normalise_routing": False},
}
SHAPE = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 2,
"num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
STRETCHED = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0,
             "original_max_position_embeddings": 32}  # fmt: skip
NARROW = {
    "vocab_size": 101,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FEW = {"num_local_experts": 5, "num_experts_per_tok": 2}
CAPPED = {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE),
    "llama tied and scaled": ("Llama", {**SHAPE, "tie_word_embeddings": True, "rope_parameters": STRETCHED}),
    "llama with biases": ("Llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", SHAPE),
    "qwen3 tied": ("Qwen3", {**SHAPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {key: value for key, value in SHAPE.items() if key != "head_dim"}),
    "qwen2 with heads of another width": ("Qwen2", SHAPE),
    "qwen2 with a window": (
        "Qwen2",
        {**SHAPE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": 5}),
    "mistral without a window": ("Mistral", {**SHAPE, "sliding_window": None}),
    "gemma2": ("Gemma2", {**SHAPE, **CAPPED, "sliding_window": 9, "num_hidden_layers": 3}),
    "gemma2 without caps": (
        "Gemma2",
        {**SHAPE, **CAPPED, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gpt2": ("GPT2", NARROW),
    "gpt2 with a width of its own": ("GPT2", {**NARROW, "n_inner": 52}),
    "mixtral": ("Mixtral", {**SHAPE, **FEW}),
    "mixtral tied": ("Mixtral", {**SHAPE, **FEW, "tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", {**SHAPE, **FEW, "moe_intermediate_size": 20, "norm_topk_prob": True}),
}
TOKENS = torch.randint(0, 101, (3, 40), generator=torch.Generator().manual_seed(5))


def our_model(**shape: Any) -> Transformer:
    torch.manual_seed(1)
    module = Transformer(Model(**{**TINY, **shape}))
    randomise(module)
    return module


def randomise(module: nn.Module) -> None:
    """Every weight, norms and biases too, so that none can be mistaken for another."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))


def save(module: Transformer, folder: Path, tokenizer: str = "bytes") -> str:
    model = module.config.model_dump(exclude={"preset"})
    manifest = Manifest(7, model, {}, {"tokenizer": tokenizer}, {}, {}, 1, "2.13", {})
    write_checkpoint(
        folder,
        manifest,
        ((StateKey.model(name), value.detach()) for name, value in module.named_parameters()),
    )
    return str(folder)


def load(checkpoint: str) -> Transformer:
    """The plain model of a checkpoint."""
    contents = Contents.open(checkpoint)
    module = Transformer(saved_model(contents.manifest, contents.address))
    weights = {key.name: contents.read(key) for key in contents.tensors if key.is_model}
    assert weights.keys() == {name for name, _ in module.named_parameters()}
    module.load_state_dict(weights, strict=False)  # a tied head is no weight of its own
    return module


def theirs_of(kind: str, shape: dict[str, Any]) -> nn.Module:
    torch.manual_seed(2)
    module = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**shape)
    built: nn.Module = module._from_config(
        config, attn_implementation="eager"
    ).eval()  # which alone knows caps
    randomise(built)
    return built


@torch.no_grad()
def assert_same_logits(ours: Transformer, theirs: nn.Module) -> None:
    expected: Tensor = theirs(TOKENS).logits
    assert expected.std() > 0.3  # the comparison is not of noise
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", OURS)
def test_what_is_exported_computes_in_transformers_what_it_computes_here(case: str, tmp_path: Path) -> None:
    ours = our_model(**OURS[case])
    export_checkpoint(save(ours, tmp_path / "step-7"), tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    theirs, about = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(about.values()), about
    assert_same_logits(ours, theirs.eval())


@pytest.mark.parametrize("case", THEIRS)
def test_what_transformers_saved_computes_here_what_it_computes_there(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(*THEIRS[case])
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    import_folder(tmp_path / "in", str(tmp_path / "step-0"))
    assert_same_logits(load(str(tmp_path / "step-0")), theirs)


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe"])
def test_experts_saved_in_one_tensor_are_read_as_well(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(*THEIRS[case])
    theirs.save_pretrained(tmp_path / "in", save_original_format=False)
    import_folder(tmp_path / "in", str(tmp_path / "step-0"))
    assert_same_logits(load(str(tmp_path / "step-0")), theirs)


@pytest.mark.parametrize("case", OURS)
def test_out_and_in_again_gives_the_same_bits(case: str, tmp_path: Path) -> None:
    ours = our_model(**OURS[case])
    export_checkpoint(save(ours, tmp_path / "step-7"), tmp_path / "out")
    import_folder(tmp_path / "out", str(tmp_path / "step-0"))
    back = load(str(tmp_path / "step-0"))
    for (name, before), (_, after) in zip(ours.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(before, after), name
    assert all(
        getattr(back.config, key) == value
        for key, value in OURS[case].items()
        if key not in ("expert_ffn", "rope_original")
    )


def test_the_bare_model_of_a_gpt2_folder_is_read_with_the_constants_beside_it(tmp_path: Path) -> None:
    """As the first GPT-2 folders are: no prefix, and each layer's mask among the weights."""
    from safetensors.torch import load_file, save_file

    theirs = theirs_of("GPT2", NARROW)
    theirs.save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    bare = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(
        {**bare, "h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.masked_bias": torch.tensor(-1e4)}, path
    )
    import_folder(tmp_path / "in", str(tmp_path / "step-0"))
    assert_same_logits(load(str(tmp_path / "step-0")), theirs)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), (None, torch.float32)])
def test_an_export_has_the_dtype_that_was_asked_for_and_transformers_keeps_it(
    dtype, expected, tmp_path: Path
) -> None:
    ours = our_model()
    export_checkpoint(save(ours, tmp_path / "step-7"), tmp_path / "out", dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == expected
    assert torch.equal(theirs.lm_head.weight, ours.head.weight.to(expected))


def test_every_byte_of_an_export_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, synced, sync = save(our_model(), tmp_path / "step-7"), dict[int, int](), os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    export_checkpoint(checkpoint, tmp_path / "out", shard_bytes=20_000)
    for path in (tmp_path / "out").iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size, path.name


def test_the_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = save(our_model(), tmp_path / "step-7", str(tmp_path / "tokenizer.json"))
    assert export_checkpoint(checkpoint, tmp_path / "out").note is None
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert opened("abba")["input_ids"] == [0, 1, 1, 0]
    assert opened.eos_token == "<|endoftext|>"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert (
        import_folder(tmp_path / "out", str(tmp_path / "step-0")).tokenizer
        == tmp_path / "out" / "tokenizer.json"
    )


@pytest.mark.parametrize(
    ("tokenizer", "says"), [("bytes", "tokens are bytes"), ("gone.json", "gone.json does not exist")]
)
def test_an_export_without_a_tokenizer_says_so(tokenizer: str, says: str, tmp_path: Path) -> None:
    note = export_checkpoint(save(our_model(), tmp_path / "step-7", tokenizer), tmp_path / "out").note
    assert note is not None
    assert says in note
