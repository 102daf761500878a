"""Convert config.json to our `[model]` and back, by the tables of families.py.

A value of either side that the other does not support is refused by key and value, all of them in one
message. Settings that only matter in training (dropout, the deviation of initial weights) are ignored,
because the job decides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

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
    to_number,
)
from shardwise.config.model import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, Model
from shardwise.errors import UserError, shown
from shardwise.files import Json

_REQUIRED = {
    "rope_interleaved": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
}
"""Keys of config.json that must have this value or be missing, in every family."""

_BOOLEAN_KEYS = ("tied", "bias", "normalise_routing")
"""Our keys of families that are true or false."""

_ROPE = {"partial_rotary_factor": 1.0}
_LLAMA3_ROPE = {
    **_ROPE,
    "low_freq_factor": LOW_FREQUENCY_FACTOR,
    "high_freq_factor": HIGH_FREQUENCY_FACTOR,
}
"""Values that the keys of rotary positions must have if they are given."""


def to_config(model: Model) -> tuple[Family, Json]:
    """Return the family of a model and its config.json without tokens and dtype."""
    family = _family_of(model)
    if problems := list(_differences(family, model)):
        raise UserError(
            f"the model cannot be written as Hugging Face's {family.architecture}, the nearest:\n  "
            + "\n  ".join(problems)
        )
    if model.experts:  # Mixtral's config.json has one width, Qwen's has two
        width = "ffn" if family is MIXTRAL else "expert_ffn"
        model = model.model_copy(update={width: model.expert_width})
    config: Json = {"architectures": [family.architecture], "model_type": family.model_type}
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


def _to_window(family: Family, model: Model) -> Json:
    if family.layer_types is None:
        return {}
    config: Json = {"sliding_window": model.window}
    if family is QWEN2:
        config |= {
            "use_sliding_window": model.window is not None,
            "max_window_layers": 0 if model.window else model.layers,
        }
    return config


def _balance_factor(layers: float, experts_per_token: float) -> float:
    """Return our `balance_loss` that equals a `router_aux_loss_coef` of 1.

    Both losses are experts · Σ f_i P_i. Their f counts each choice of a token, ours is a mean over choices.
    They compute f and P over all layers together, and we sum over layers. If layers route alike, both have
    the same gradients (tests/models/test_experts.py). Otherwise an expert that is overloaded in one layer may
    compensate for another layer in their loss, and not in ours.
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
    """Yield what of a model its family does not have."""
    for key, wanted in family.fixed.items():
        if (value := getattr(model, key)) != wanted:
            right = "none; leave it out" if wanted is None else repr(wanted)
            yield f"model.{key} = {value!r}: such a model has {right}"
    if family is GPT2:
        yield from _differences_from_gpt2(model)
    if family is GEMMA2:
        yield from _differences_from_gemma2(model)


def _differences_from_gpt2(model: Model) -> Iterator[str]:
    if model.kv_heads != model.heads:
        yield f"model.kv_heads = {model.kv_heads}: such a model has as many as model.heads = {model.heads}"
    if model.heads * model.head_dim != model.hidden:
        yield (
            f"model.head_dim = {model.head_dim}: such a model has model.hidden / model.heads = "
            f"{model.hidden / model.heads:g}"
        )


def _differences_from_gemma2(model: Model) -> Iterator[str]:
    if model.query_scalar is not None and not model.query_scalar.is_integer():
        yield f"model.query_scalar = {model.query_scalar:g}: such a model has a whole number"
    if model.window is None:
        yield (
            "model.window: such a model has one, on every second layer; a window of model.max_positions cuts "
            "nothing"
        )


def _to_rope(model: Model) -> Json:
    """Return the keys of rotary positions as older versions of transformers write them, since all read
    those."""
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


def to_model(config: Json, source: str) -> tuple[Family, Model]:
    """Return the family and our model of a config.json; every key that we do not support is named."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UserError(
            f"{source}: model_type = {shown(config.get('model_type'))} is not known; {', '.join(FAMILIES)} "
            "are"
        )
    problems = [*_refused(family, config)]
    fields = _read_fields(family, config, problems)
    if family is not GPT2 and not problems:
        fields |= _from_rope(family, config, problems)
    if problems:
        raise _unreadable(source, problems)
    fields = {**family.fixed, **fields, **_derived_fields(family, config, fields)}
    try:
        layers = Model.model_validate(fields).layers
        model = Model.model_validate({**fields, **_from_window(family, config, layers, problems)})
    except ValidationError as error:
        raise _unreadable(
            source,
            [f"{detail['loc'][0]} = {shown(detail['input'])}: {detail['msg']}" for detail in error.errors()],
        ) from None
    if problems := [*problems, *problems_across({"model": model})]:
        raise _unreadable(source, problems)
    return family, model


def _derived_fields(family: Family, config: Json, fields: Mapping[str, object]) -> Json:
    """Return our keys that are computed from several keys of config.json."""
    derived: Json = {ours: config.get(key, default) for ours, (key, default) in family.caps.items()}
    if family is GPT2:
        heads = to_number(fields, "heads")
        derived |= {"kv_heads": heads, "head_dim": to_number(fields, "hidden") // heads}
    if "query_scalar" in fields:
        derived["query_scalar"] = float(to_number(fields, "query_scalar"))
    if "experts" in fields:
        factor = _balance_factor(to_number(fields, "layers"), to_number(fields, "experts_per_token"))
        derived["balance_loss"] = to_number(config, "router_aux_loss_coef", 0.0) * factor
    return derived


def _unreadable(source: str, problems: Iterable[str]) -> UserError:
    return UserError(f"{source} describes a model that shardwise does not have:\n  " + "\n  ".join(problems))


def _refused(family: Family, config: Json) -> Iterator[str]:
    """Yield the values of config.json that we do not support."""
    for key, values in {**family.demands, **{key: (value,) for key, value in _REQUIRED.items()}}.items():
        if (value := config.get(key, values[0])) not in values:
            yield f"{key} = {shown(value)}: only {' or '.join(map(repr, values))} is known"
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        yield f"layer_types = {shown(kinds)}: not a list"
    elif family.layer_types is not None:
        yield from _refused_window(config, kinds)
        return
    elif others := sorted({str(kind) for kind in kinds if kind != FULL}):
        yield f"layer_types holds {', '.join(others[:8])}: only full_attention is known"
    yield from _refused_numbers(config)


def _refused_window(config: Json, kinds: list[object]) -> Iterator[str]:
    """Yield what is wrong with the keys of sliding windows in a family that has windows."""
    for key in ("sliding_window", "max_window_layers"):
        if not isinstance(config.get(key), int | None):
            yield f"{key} = {shown(config[key])}: not a number"
    if config.get("use_sliding_window") and not kinds and config.get("max_window_layers", 0) is None:
        yield "max_window_layers = None: not a number, and there are no layer_types"


def _refused_numbers(config: Json) -> Iterator[str]:
    """Yield the first value that is not a number, or a window that would matter in a family without one."""
    for key in ("sliding_window", "max_position_embeddings", "router_aux_loss_coef"):
        if not isinstance(config.get(key), int | float | None):
            yield f"{key} = {shown(config[key])}: not a number"
            return
    window, longest = (to_number(config, key, 0) for key in ("sliding_window", "max_position_embeddings"))
    if window and longest and window < longest and config.get("use_sliding_window", True):
        yield (
            f"sliding_window = {window}: shorter than max_position_embeddings = {longest}, so that it would "
            "cut attention"
        )


def _from_window(family: Family, config: Json, layers: int, problems: list[str]) -> Json:
    """Return our key of the sliding window, from `sliding_window` and the list of layers that have it."""
    if family.layer_types is None:
        return {}
    window = config.get("sliding_window", WINDOW)
    kinds = config.get("layer_types") or family.layer_types(config, layers)
    # Mistral's class ignores the list of layers.
    if window is None or (kinds == [FULL] * layers and family is not MISTRAL):
        return {}
    patterns = {
        "all": ("all layers", [SLIDING] * layers),
        "even": (
            "every second layer from the first on",
            [FULL if layer % 2 else SLIDING for layer in range(layers)],
        ),
    }
    where, pattern = patterns[str(family.fixed.get("window_layers", "all"))]
    if kinds != pattern:
        problems.append(f"layer_types = {shown(kinds)}: only a window on {where}, or on none, is known")
    return {"window": window}


def _read_fields(family: Family, config: Json, problems: list[str]) -> Json:
    """Return the values of the keys that have a counterpart, with defaults for those that are missing."""
    fields: Json = {}
    for ours, keys in family.fields.items():
        values = {key: config[key] for key in keys if config.get(key) is not None}
        problems.extend(reasons := list(_problems_of_values(ours, values)))
        if values and not reasons:
            fields[ours] = next(iter(values.values()))
        elif not values and ours not in family.defaults:
            problems.append(f"{' or '.join(keys)} is missing")
    if not problems:
        missing = family.defaults.keys() & family.fields.keys() - fields.keys()
        fields |= {ours: default(config) for ours, default in family.defaults.items() if ours in missing}
    return fields


def _problems_of_values(ours: str, values: Json) -> Iterator[str]:
    """Yield what is wrong with the values of the keys that mean the same as one of ours."""
    wrong = {key: value for key, value in values.items() if not _is_sound(ours, value)}
    for key, value in wrong.items():
        yield f"{key} = {shown(value)}: not a number above 0"
    if not wrong and len(set(map(repr, values.values()))) > 1:
        given = " and ".join(f"{key} = {shown(value)}" for key, value in values.items())
        yield f"{given}: only the same for all is known"


def _is_sound(ours: str, value: object) -> bool:
    """Whether a value is a positive number, or a bool if the key is one; the model checks the rest."""
    if isinstance(value, bool):
        return ours in _BOOLEAN_KEYS
    return isinstance(value, int | float) and value > 0


def _from_rope(family: Family, config: Json, problems: list[str]) -> Json:
    """Return our keys of rotary positions, from `rope_parameters` (transformers 5), or from `rope_theta` and
    `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        problems.append(f"{key} = {shown(scaling)}: not an object")
        return {}
    fields: Json = {"rope_theta": scaling.get("rope_theta") or config.get("rope_theta") or family.rope_theta}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "llama3":
        fields |= {
            "rope_scale": scaling.get("factor"),
            "rope_original": scaling.get("original_max_position_embeddings"),
        }
    missing = [name for name, value in fields.items() if value is None]
    problems.extend(f"{key}{problem}" for problem in _problems_of_rope(scaling, kind))
    problems.extend(f"{key}: the {name.removeprefix('rope_')} is missing" for name in missing)
    return fields


def _problems_of_rope(scaling: Json, kind: object) -> Iterator[str]:
    """Yield the ends of messages about values of rotary positions that we do not support."""
    if kind not in ("default", "llama3"):
        yield f".rope_type = {shown(kind)}: only 'default' and 'llama3' are known"
    for name, value in (_LLAMA3_ROPE if kind == "llama3" else _ROPE).items():
        if scaling.get(name, value) != value:
            yield f".{name} = {shown(scaling[name])}: only {value!r} is known"
