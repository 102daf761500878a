"""config.json and our `[model]`, each from the other, by the tables of families.py.

A key of theirs that we cannot follow, or one of ours that they have no word for, is refused with its name and
value, all at once. What only matters in training (dropout, the initial deviation) is left behind: the job
says that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from shardwise.config.check import problems_across
from shardwise.config.families import (
    FAMILIES,
    FULL,
    GEMMA2,
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SLIDING,
    WINDOW,
    Family,
)
from shardwise.config.model import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, Model
from shardwise.errors import UserError, shown

_NEVER = {
    "rope_interleaved": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
}
"""Keys of any config.json that we cannot follow unless they say this, or are missing."""

_TRUTHS = ("tied", "bias", "normalise_routing")
"""Our keys of families that are true or false."""


def to_config(model: Model) -> tuple[Family, dict[str, Any]]:
    """The family of a model and its config.json, tokens and dtype left out."""
    family = _family_of(model)
    if problems := list(_differences(family, model)):
        raise UserError(
            f"the model cannot be written as Hugging Face's {family.architecture}, the nearest:\n  "
            + "\n  ".join(problems)
        )
    if family is MIXTRAL:  # it has one key for the width
        model = model.model_copy(update={"ffn": model.expert_width})
    if family is QWEN3_MOE:
        model = model.model_copy(update={"expert_ffn": model.expert_width})
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: getattr(model, ours) for ours, keys in family.fields.items() for key in keys}
    config |= {key: values[0] for key, values in family.demands.items()}
    config |= {key: getattr(model, ours) for ours, (key, _) in family.caps.items()}
    if family is GEMMA2:
        config["query_pre_attn_scalar"] = int(model.query_scalar or model.head_dim)
    if family is GPT2:
        return family, config | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if model.experts:
        config["router_aux_loss_coef"] = model.balance_loss / _balance_factor(
            model.layers, model.experts_per_token
        )
    return family, config | _to_rope(model) | _to_window(family, model)


def _to_window(family: Family, model: Model) -> dict[str, Any]:
    if family.layer_types is None:
        return {}
    config: dict[str, Any] = {"sliding_window": model.window}
    if family is QWEN2:
        config |= {
            "use_sliding_window": model.window is not None,
            "max_window_layers": 0 if model.window else model.layers,
        }
    return config


def _balance_factor(layers: int, experts_per_token: int) -> float:
    """Our `balance_loss` for their `router_aux_loss_coef` of 1. Both losses are experts · Σ f_i P_i. Their f
    counts each of a token's choices, ours is a mean over them; they take f and P over the choices of all
    layers together, we sum over layers. Where layers route alike, both have the same gradients
    (tests/models/test_experts.py); where they do not, theirs lets one layer's crowd make up for another's,
    and ours does not.
    """
    return experts_per_token / layers


def _family_of(model: Model) -> Family:
    if model.positions == "learned":
        return GPT2
    if model.norm == "rms+1":
        return GEMMA2
    if model.experts:
        return QWEN3_MOE if model.qk_norm else MIXTRAL
    if model.bias == "qkv":
        return QWEN2
    if model.qk_norm:
        return QWEN3
    return LLAMA if model.window is None else MISTRAL


def _differences(family: Family, model: Model) -> Iterator[str]:
    for key, wanted in family.fixed.items():
        if (value := getattr(model, key)) != wanted:
            right = "none; leave it out" if wanted is None else repr(wanted)
            yield f"model.{key} = {value!r}: such a model has {right}"
    if family is GPT2 and model.kv_heads != model.heads:
        yield f"model.kv_heads = {model.kv_heads}: such a model has as many as model.heads = {model.heads}"
    if family is GEMMA2 and model.query_scalar is not None and not model.query_scalar.is_integer():
        yield f"model.query_scalar = {model.query_scalar:g}: such a model has a whole number"
    if family is GEMMA2 and model.window is None:
        yield (
            "model.window: such a model has one, on every second layer; a window of model.max_positions cuts "
            "nothing"
        )
    if family is GPT2 and model.heads * model.head_dim != model.hidden:
        yield (
            f"model.head_dim = {model.head_dim}: such a model has model.hidden / model.heads = "
            f"{model.hidden / model.heads:g}"
        )


def _to_rope(model: Model) -> dict[str, Any]:
    """In the older of the two spellings, which every version of the library reads."""
    if model.rope_scale == 1:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    scaling = {
        "rope_type": "llama3",
        "factor": model.rope_scale,
        "low_freq_factor": LOW_FREQUENCY_FACTOR,
        "high_freq_factor": HIGH_FREQUENCY_FACTOR,
        "original_max_position_embeddings": model.rope_original,
    }
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def to_model(config: dict[str, Any], source: str) -> tuple[Family, Model]:
    """The family and our model of a config.json; every key that we cannot follow is named."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UserError(
            f"{source}: model_type = {shown(config.get('model_type'))} is not known; "
            f"{', '.join(FAMILIES)} are"
        )
    problems = [*_refused(family, config)]
    fields = _read_fields(family, config, problems)
    if family is not GPT2 and not problems:
        fields |= _from_rope(family, config, problems)
    if problems:
        raise _unreadable(source, problems)
    if family is GPT2:
        fields |= {"kv_heads": fields["heads"], "head_dim": fields["hidden"] // fields["heads"]}
    if "query_scalar" in fields:
        fields["query_scalar"] = float(fields["query_scalar"])
    fields |= {ours: config.get(key, usual) for ours, (key, usual) in family.caps.items()}
    if "experts" in fields:
        factor = _balance_factor(fields["layers"], fields["experts_per_token"])
        fields["balance_loss"] = (config.get("router_aux_loss_coef") or 0.0) * factor
    try:
        model = Model.model_validate({**family.fixed, **fields})
        model = Model.model_validate(
            {**family.fixed, **fields, **_from_window(family, config, model.layers, problems)}
        )
    except ValidationError as error:
        raise _unreadable(
            source,
            [f"{detail['loc'][0]} = {shown(detail['input'])}: {detail['msg']}" for detail in error.errors()],
        ) from None
    if problems := [*problems, *problems_across({"model": model})]:
        raise _unreadable(source, problems)
    return family, model


def _unreadable(source: str, problems: Iterable[str]) -> UserError:
    return UserError(f"{source} describes a model that shardwise does not have:\n  " + "\n  ".join(problems))


def _refused(family: Family, config: dict[str, Any]) -> Iterator[str]:
    for key, values in {**family.demands, **{key: (value,) for key, value in _NEVER.items()}}.items():
        if (value := config.get(key, values[0])) not in values:
            yield f"{key} = {shown(value)}: only {' or '.join(map(repr, values))} is known"
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        yield f"layer_types = {shown(kinds)}: not a list"
    elif family.layer_types is not None:
        for key in ("sliding_window", "max_window_layers"):
            if not isinstance(config.get(key) or 0, int):
                yield f"{key} = {shown(config[key])}: not a number"
        if config.get("use_sliding_window") and not kinds and config.get("max_window_layers", 0) is None:
            yield "max_window_layers = None: not a number, and there are no layer_types"
        return
    elif others := sorted({str(kind) for kind in kinds if kind != "full_attention"}):
        yield f"layer_types holds {', '.join(others[:8])}: only full_attention is known"
    for key in ("sliding_window", "max_position_embeddings", "router_aux_loss_coef"):
        if not isinstance(config.get(key) or 0, int | float):
            yield f"{key} = {shown(config[key])}: not a number"
            return
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and longest and window < longest and config.get("use_sliding_window", True):
        yield (
            f"sliding_window = {window}: shorter than max_position_embeddings = {longest}, so that it would "
            f"cut attention"
        )


def _from_window(family: Family, config: dict[str, Any], layers: int, problems: list[str]) -> dict[str, Any]:
    """How far back tokens see, from `sliding_window` and the list of layers that have it."""
    if family.layer_types is None:
        return {}
    window, kinds = (
        config.get("sliding_window", WINDOW),
        config.get("layer_types") or family.layer_types(config, layers),
    )
    if window is None or (
        kinds == [FULL] * layers and family is not MISTRAL
    ):  # whose class does not look at the list
        return {}
    patterns = {
        "all": [SLIDING] * layers,
        "even": [FULL if layer % 2 else SLIDING for layer in range(layers)],
    }
    asked = family.fixed.get("window_layers", "all")
    if kinds != patterns[asked]:
        where = {"all": "all layers", "even": "every second layer from the first on"}[asked]
        problems.append(f"layer_types = {shown(kinds)}: only a window on {where}, or on none, is known")
    return {"window": window}


def _read_fields(family: Family, config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for ours, keys in family.fields.items():
        values = {key: config[key] for key in keys if config.get(key) is not None}
        if wrong := [
            f"{key} = {shown(value)}: not a number above 0"
            for key, value in values.items()
            if not _is_sound(ours, value)
        ]:
            problems.extend(wrong)
        elif len(set(map(repr, values.values()))) > 1:
            problems.append(
                " and ".join(f"{key} = {shown(value)}" for key, value in values.items())
                + ": only the same for all is known"
            )
        elif values:
            fields[ours] = next(iter(values.values()))
        elif ours not in family.defaults:
            problems.append(f"{' or '.join(keys)} is missing")
    if not problems:
        fields |= {
            ours: make(config)
            for ours, make in family.defaults.items()
            if ours in family.fields and ours not in fields
        }
    return fields


def _is_sound(ours: str, value: Any) -> bool:
    """A size or a small number, or a truth value where that is what is asked; further rules are the model's
    own."""
    if isinstance(value, bool):
        return ours in _TRUTHS
    return isinstance(value, int | float) and value > 0


def _from_rope(family: Family, config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """From `rope_parameters` (transformers 5), or from `rope_theta` beside `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        problems.append(f"{key} = {shown(scaling)}: not an object")
        return {}
    fields: dict[str, Any] = {
        "rope_theta": scaling.get("rope_theta") or config.get("rope_theta") or family.rope_theta
    }
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    required: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if kind == "llama3":
        required |= {"low_freq_factor": LOW_FREQUENCY_FACTOR, "high_freq_factor": HIGH_FREQUENCY_FACTOR}
        fields |= {
            "rope_scale": scaling.get("factor"),
            "rope_original": scaling.get("original_max_position_embeddings"),
        }
    elif kind != "default":
        problems.append(f"{key}.rope_type = {shown(kind)}: only 'default' and 'llama3' are known")
    for name, value in required.items():
        if scaling.get(name, value) != value:
            problems.append(f"{key}.{name} = {shown(scaling[name])}: only {value!r} is known")
    problems.extend(
        f"{key}: the {name.removeprefix('rope_')} is missing"
        for name, value in fields.items()
        if value is None
    )
    return fields
