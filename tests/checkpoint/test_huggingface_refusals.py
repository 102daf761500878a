"""What has no counterpart is refused by name, in both directions, and a folder that is not what it says is
not read."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.conversions import to_theirs
from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.checkpoint.pretrained import import_folder, open_folder
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import write_checkpoint
from shardwise.config import PRESETS, Model
from shardwise.config.families import FAMILIES
from shardwise.config.family_tensors import tensor_matches, their_shapes
from shardwise.config.model_config import to_config, to_model
from shardwise.config.parameters import parameter_shapes
from shardwise.errors import UserError
from shardwise.models import Transformer

TINY = {
    "layers": 1,
    "hidden": 8,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "ffn": 12,
    "vocabulary": 19,
    "max_positions": 16,
}
LEARNED = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
MIXTURE = {"experts": 4, "experts_per_token": 2}


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"norm": "layer"}, ["model.norm = 'layer'"]),
        ({"activation": "gelu", "norm": "layer"}, ["model.norm = 'layer'", "model.activation = 'gelu'"]),
        ({"qk_norm": True, "bias": True}, ["model.bias = True"]),
        ({"qk_norm": True, "window": 4}, ["model.window = 4"]),
        (
            {"post_norms": True, "logit_softcap": 2.0},
            ["model.post_norms = True", "model.logit_softcap = 2.0"],
        ),
        ({"norm": "rms+1"}, ["model.activation = 'swiglu'", "model.window: such a model has one"]),
        ({**LEARNED, "bias": False}, ["model.bias = False"]),
        ({**LEARNED, "kv_heads": 1}, ["model.kv_heads = 1"]),
        ({**LEARNED, "head_dim": 6}, ["model.head_dim = 6"]),
        ({**MIXTURE, "shared_experts": 1}, ["model.shared_experts = 1"]),
        (
            {**MIXTURE, "router": "sigmoid", "routing_scale": 2.0},
            ["model.router = 'sigmoid'", "model.routing_scale = 2.0"],
        ),
        ({**MIXTURE, "balance_bias": 0.001}, ["model.balance_bias = 0.001"]),
        ({**MIXTURE, "normalise_routing": False}, ["model.normalise_routing = False"]),
        ({"module": "mine.py:Mine"}, ["model.module = 'mine.py:Mine'"]),
    ],
)
def test_a_model_that_no_family_can_hold_is_refused_by_its_fields(
    shape: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        to_config(Model(**{**TINY, **shape}))
    assert all(name in str(refusal.value) for name in named)


LLAMA = {"model_type": "llama", "vocab_size": 19, "hidden_size": 8, "intermediate_size": 12,
"num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 19,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "layer_norm_epsilon": 1e-5,
}
STRETCHED = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma"}, "model_type = 'gemma'"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**LLAMA, "attention_bias": True, "mlp_bias": False}, "attention_bias = True and mlp_bias = False"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters.rope_type = 'yarn'",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling: the original is missing",
        ),
        (
            {**LLAMA, "rope_scaling": {**STRETCHED, "high_freq_factor": 5}},
            "rope_scaling.high_freq_factor = 5",
        ),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved = True"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}, "rms_norm_eps is missing"),
        ({**LLAMA, "hidden_size": "8"}, "hidden_size = '8'"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads = 0"),
        ({**LLAMA, "num_attention_heads": False}, "num_attention_heads = False"),
        ({**GPT2, "n_head": False}, "n_head = False"),
        ({**MIXTRAL, "num_hidden_layers": False}, "num_hidden_layers = False"),
        (
            {
                **LLAMA,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": None,
            },
            "max_window_layers = None",
        ),
        ({**LLAMA, "rope_theta": "much"}, "rope_theta = 'much'"),
        ({**LLAMA, "rope_scaling": "llama3"}, "rope_scaling = 'llama3'"),
        ({**LLAMA, "num_key_value_heads": 3}, "model.kv_heads = 3"),
        ({**LLAMA, "model_type": "qwen3", "attention_bias": True}, "attention_bias = True"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["sliding_attention"]},
            "layer_types holds sliding_attention",
        ),
        (
            {**LLAMA, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4},
            "sliding_window = 4",
        ),
        ({**MIXTRAL, "sliding_window": 8}, "sliding_window = 8"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": "8"}, "sliding_window = '8'"),
        ({**LLAMA, "model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types"),
        (
            {
                **LLAMA,
                "num_hidden_layers": 2,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "layer_types = ['full_attention', 'sliding_attention']: only a window on all layers",
        ),
        ({**GPT2, "activation_function": "relu"}, "activation_function = 'relu'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (
            {**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 4, "decoder_sparse_step": 2},
            "decoder_sparse_step = 2",
        ),
        (
            {**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 4, "mlp_only_layers": [0]},
            "mlp_only_layers = [0]",
        ),
    ],
)
def test_a_configuration_that_we_cannot_follow_is_refused_with_key_and_value(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=r"config\.json") as refusal:
        to_model(config, "config.json")
    assert named in str(refusal.value)


@pytest.mark.parametrize("value", [{}, [], "", "x", True, None, -1, 0, 0.5, 1e300, [1], {"a": 1}], ids=repr)
def test_a_value_of_another_kind_is_read_or_refused_whichever_key_has_it(value: Any) -> None:
    written = [to_config(Model(**preset))[1] for preset in PRESETS.values()]
    more = ("sliding_window", "max_window_layers", "router_aux_loss_coef", "layer_types")
    for config in {one["model_type"]: one for one in written}.values():
        for key in (*config, *more):
            with suppress(UserError):
                assert isinstance(to_model({**config, key: value}, "config.json")[1], Model)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_shapes_are_known_without_torch_as_torch_finds_them(model_type: str) -> None:
    mixture = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    config = (
        GPT2 if model_type == "gpt2" else {**LLAMA, **(mixture if FAMILIES[model_type].tensors.fused else {})}
    )
    family, model = to_model({**config, "model_type": model_type}, "config.json")
    ours = parameter_shapes(model)
    for match in [
        match
        for fused in (False, True)
        for match in tensor_matches(family.tensors, model, fused and bool(model.experts))
    ]:
        theirs = to_theirs(match, [torch.empty(ours[name]) for name in match.ours])
        assert [*their_shapes(match, ours).values()] == [tuple(tensor.shape) for tensor in theirs]


@pytest.mark.parametrize("window", [None, 16, 4096])
def test_a_window_that_is_never_reached_does_not_matter(window: int | None) -> None:
    assert to_model({**MIXTRAL, "sliding_window": window}, "config.json")[1].experts == 4


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"gpt2"}))
def test_a_missing_base_of_rotary_positions_is_what_the_library_takes(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    base = getattr(theirs, "rope_theta", None) or theirs.rope_parameters["rope_theta"]
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    assert to_model({**LLAMA, **mixture, "model_type": model_type}, "config.json")[1].rope_theta == base


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_a_family_and_comes_back_as_it_was(preset: str) -> None:
    model = Model(**PRESETS[preset])
    family, config = to_config(model)
    assert FAMILIES[config["model_type"]] is family
    back = to_model(json.loads(json.dumps(config)), preset)[1]
    unused = {"preset", "rope_original", *(("rope_theta",) if model.positions == "learned" else ())}
    assert back.model_dump(exclude=unused) == model.model_dump(exclude=unused)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    model = Model(**TINY)
    manifest = Manifest(
        3, model.model_dump(exclude={"preset"}), {}, {"tokenizer": "bytes"}, {}, {}, 1, "2.13", {}
    )
    weights = (
        (StateKey.model(name), value.detach()) for name, value in Transformer(model).named_parameters()
    )
    write_checkpoint(tmp_path / "step-3", manifest, weights)
    return str(tmp_path / "step-3")


@pytest.fixture
def folder(checkpoint: str, tmp_path: Path) -> Path:
    export_checkpoint(checkpoint, tmp_path / "hf")
    return tmp_path / "hf"


def change(folder: Path, **weights: torch.Tensor | None) -> None:
    """Replace, add or, with None, take away tensors; dots are written as double underscores."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **{name.replace("__", "."): value for name, value in weights.items()}}
    save_file({name: value for name, value in held.items() if value is not None}, path)


def test_missing_extra_and_misshapen_tensors_are_named_together(folder: Path) -> None:
    change(
        folder,
        model__norm__weight=None,
        model__layers__0__odd=torch.ones(2),
        lm_head__weight=torch.ones(19, 9),
    )
    with pytest.raises(UserError) as refusal:
        open_folder(folder)
    said = str(refusal.value)
    assert "missing: model.norm.weight" in said
    assert "not part of such a model: model.layers.0.odd" in said
    assert "lm_head.weight has shape (19, 9) instead of (19, 8)" in said


def test_coded_numbers_are_refused(folder: Path) -> None:
    change(folder, lm_head__weight=torch.ones(19, 8, dtype=torch.int8))
    with pytest.raises(UserError, match=r"lm_head.weight is I8"):
        open_folder(folder)


def test_a_tied_head_must_be_the_embedding(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(
        UserError,
        match=r"tie_word_embeddings = true, but lm_head.weight and model.embed_tokens.weight differ",
    ):
        import_folder(folder, str(tmp_path / "step-0"))
    change(
        folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    )
    assert import_folder(folder, str(tmp_path / "step-0")).model.tied


def test_pickled_weights_are_refused_with_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin.*Convert them to safetensors"):
        open_folder(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 20, struct.pack("<Q", 1 << 40) + b"{}", b"no header at all, but long enough"]
)
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"a": "../model.safetensors"}, r"index\.json: weight_map\.a = '\.\./model\.safetensors'"),
        ({"a": "/etc/passwd"}, r"weight_map\.a = '/etc/passwd'"),
        ({"a": 3}, r"weight_map\.a = 3"),
        ("all", r"weight_map = 'all'"),
        ({"a": "x" * 300 + ".safetensors"}, r"only files in the folder itself are read"),
        ({"a": "absent.safetensors"}, r"lacks absent.safetensors"),
        ({"a": "model.safetensors"}, r"model.safetensors lacks a"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(folder: Path, places: Any, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match=says):
        open_folder(folder)


def test_an_existing_folder_is_never_written_to(checkpoint: str, folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="is there already and not empty"):
        export_checkpoint(checkpoint, folder)
    with pytest.raises(UserError, match="is there already and not empty"):
        import_folder(folder, checkpoint)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    export_checkpoint(checkpoint, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == before.keys()


def test_a_damaged_checkpoint_is_not_exported_and_leaves_nothing(checkpoint: str, tmp_path: Path) -> None:
    data = next(Path(checkpoint).glob("rank-0-*"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=data.name):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"step-3"}


def test_an_export_that_fails_half_way_leaves_nothing(checkpoint: str, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        export_checkpoint(checkpoint, tmp_path / "out", progress=full)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3"}
