"""What users of other training programs write, and the key of a job that means the same.

Names are those of transformers, TRL, axolotl, torchtitan, Megatron-LM and DeepSpeed. The table is used for
messages only: a job is written in the keys of config/schema.py, and a name from here is refused with the key
to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.config.schema import SECTIONS, keys_of

SURE, LIKELY = 0.8, 0.6
"""How alike two words are (difflib's ratio) where one is surely, or likely, the other one misspelt."""


class OurKey(NamedTuple):
    """A key of a job that another program calls by another name."""

    key: str
    """As section.key; empty where a job has no such key, and the note says what to do instead."""
    value: str = ""
    """The value that the other name stands for, or in capitals what to write; empty: the value that was given
    to it."""
    note: str = ""
    """A sentence about how the two keys differ; may be empty."""

    def setting(self, given: str = "VALUE") -> str:
        """What to write on the command line for a value that was given to the other name, and how the two
        differ."""
        written = f"{self.key}={self.value or given}" if self.key else ""
        return f"{written} ({self.note})" if written and self.note else written or self.note

    def __str__(self) -> str:
        key = f"{self.key} = {self.value}" if self.value else self.key
        return (
            f"Did you mean {key}?{f' ({self.note})' if self.note else ''}"
            if key
            else f"{self.note[0].upper()}{self.note[1:]}"
        )


_ACCUMULATED = OurKey(
    "train.micro_batch",
    "N",
    "the number of micro-batches follows: train.global_batch / devices / train.micro_batch",
)
_EPOCHS = OurKey(
    "",
    "",
    "the length of a run is train.steps: an epoch has (sequences of the data) / train.global_batch steps",
)
_EVERY_STEP = OurKey("", "", "every step is written to metrics.jsonl of run.folder; leave it out")
_NO_LORA = OurKey(
    "", "", "LoRA is not there; leave it out, or freeze weights in a module of your own (docs/sharding.md)"
)
_BY_ITSELF = OurKey("", "", "the fastest attention that fits is chosen by itself; leave it out")
_PACKED = OurKey("", "", "documents are always packed; leave it out")
_WORKERS = OurKey("", "", "the number of local workers is an option: --workers N")
_OF_ALL = OurKey(
    "train.global_batch",
    "",
    "sequences of a step over all devices; train.micro_batch: of one forward on one device",
)
_STEPS_OF_WARMUP = OurKey("train.warmup", "N", "in steps")
_SHARE_OF_PEAK = OurKey("train.final_learning_rate", "SHARE", "as a share of the peak")
_BETAS = OurKey("optimizer.betas", "[0.9,0.95]", "both in one list")

OTHER_NAMES: dict[str, OurKey] = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), OurKey("train.learning_rate")),
    **dict.fromkeys(("min_lr", "min_learning_rate", "min_lr_factor"), _SHARE_OF_PEAK),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler", "decay_type"),
    OurKey("train.schedule")),
    **dict.fromkeys(("warmup_steps", "lr_warmup_iters"), OurKey("train.warmup")),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_fraction"), _STEPS_OF_WARMUP),
    **dict.fromkeys(("decay_steps", "lr_decay_iters"), OurKey("train.decay")),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), _OF_ALL),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size", "local_batch_size", "per_device_train_batch_size",
         "train_micro_batch_size_per_gpu"),
        OurKey("train.micro_batch"),
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation"),
    _ACCUMULATED),
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "num_train_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps", "train_iters", "training_steps", "num_steps", "total_steps", "iters"),
    OurKey("train.steps")),
    **dict.fromkeys(("lora", "lora_r", "lora_alpha", "lora_dropout", "peft", "use_peft", "qlora", "adapter"),
    _NO_LORA),
    **dict.fromkeys(("attn_implementation", "flash_attention", "use_flash_attn", "sdp_attention"),
    _BY_ITSELF),
    **dict.fromkeys(("packing", "sample_packing"), _PACKED),
    "shares": OurKey("train.driver", "by-speed", "or synchronous: even shares"),
    "local_steps": OurKey("local.sync_every"),
    **dict.fromkeys(("wd", "l2"), OurKey("optimizer.weight_decay")),
    **dict.fromkeys(("max_grad_norm", "max_norm", "gradient_clipping", "clip_grad", "grad_clip",
    "gradient_clip_val"),
                    OurKey("train.clip")),
    **dict.fromkeys(("optim", "optimizer", "optimizer_type"), OurKey("optimizer.name")),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), _BETAS),
    **dict.fromkeys(("eps", "adam_eps", "adam_epsilon"), OurKey("optimizer.epsilon")),
    **dict.fromkeys(("bf16", "bfloat16"), OurKey("train.precision", "bfloat16")),
    **dict.fromkeys(("fp16", "float16", "half"), OurKey("train.precision", "float16")),
    **dict.fromkeys(("fp8", "float8", "fp8_format"), OurKey("train.precision", "float8")),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "mixed_precision_param"),
    OurKey("train.precision")),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpoint", "activation_checkpointing",
        "activation_checkpoint_mode",
         "recompute_granularity", "recompute_activations"),
        OurKey("train.recompute", "full", "or selective, or a number from 0 to 1"),
    ),
    **dict.fromkeys(("torch_compile", "compile_model"), OurKey("train.compile")),
    **dict.fromkeys(("random_seed", "data_seed"), OurKey("train.seed")),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every", "eval_freq"),
    OurKey("train.evaluate_every")),
    **dict.fromkeys(("logging_steps", "log_interval", "log_every", "log_freq"), _EVERY_STEP),
    **dict.fromkeys(("save_steps", "save_interval", "save_every", "checkpoint_interval", "checkpoint_every"),
                    OurKey("checkpoint.every")),
    **dict.fromkeys(("save_total_limit", "keep_latest_k"), OurKey("checkpoint.keep")),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from", "load"), OurKey("checkpoint.resume")),
    **dict.fromkeys(("async_save", "async_mode"), OurKey("checkpoint.background", "true")),
    **dict.fromkeys(("output_dir", "out_dir", "output", "save_dir", "dump_folder", "folder"),
    OurKey("run.folder")),
    **dict.fromkeys(("wandb_project", "project"), OurKey("observe.wandb")),
    "report_to": OurKey("observe.wandb", "PROJECT"),
    **dict.fromkeys(("enable_tensorboard", "tensorboard_dir"), OurKey("observe.tensorboard", "true")),
    **dict.fromkeys(("tp", "tensor_parallel", "tp_size", "tensor_parallel_size", "tensor_parallel_degree",
                     "tensor_model_parallel_size"), OurKey("layout.tensor")),
    **dict.fromkeys(("pp", "pipeline_parallel", "pp_size", "pipeline_parallel_size",
    "pipeline_parallel_degree",
                     "pipeline_model_parallel_size"), OurKey("layout.pipeline")),
    **dict.fromkeys(("cp", "context_parallel", "cp_size", "context_parallel_size", "context_parallel_degree",
                     "sequence_parallel_degree"), OurKey("layout.context")),
    **dict.fromkeys(("ep", "expert_parallel", "ep_size", "expert_parallel_size", "expert_parallel_degree",
                     "expert_model_parallel_size"), OurKey("layout.expert")),
    **dict.fromkeys(("dp", "data_parallel", "dp_size", "dp_shard", "data_parallel_size",
    "data_parallel_degree",
                     "data_parallel_shard_degree"), OurKey("layout.data")),
    **dict.fromkeys(("dp_replicate", "data_parallel_replicate_degree", "hsdp"), OurKey("layout.replica")),
    **dict.fromkeys(("zero_stage", "stage", "zero_optimization"), OurKey("layout.zero")),
    **dict.fromkeys(("fsdp", "fully_shard"), OurKey("layout.zero", "3")),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "fsdp_offload_params"), OurKey("layout.offload",
    "true")),
    **dict.fromkeys(("pipeline_schedule", "pipeline_parallel_schedule", "pp_schedule"),
    OurKey("layout.schedule")),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "virtual_stages"),
    OurKey("layout.stages_per_rank")),
    **dict.fromkeys(("compress", "gradient_compression", "grad_compression", "communication_data_type"),
                    OurKey("layout.compression")),
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node", "num_processes", "devices", "n_gpus"), _WORKERS),
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_len", "max_seq_len", "max_seq_length", "max_length", "block_size",
        "context_length"),
        OurKey("data.sequence_length"),
    ),
    **dict.fromkeys(("data", "dataset", "dataset_path", "dataset_name", "data_path", "train_file",
    "train_data"),
                    OurKey("data.source")),
    **dict.fromkeys(("dataset_text_field", "text_column"), OurKey("data.text_field")),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "tokenizer_model", "tokenizer_name_or_path"),
    OurKey("data.tokenizer")),
    **dict.fromkeys(("val_split", "val_set_size", "validation_split"), OurKey("data.held_out")),
    **dict.fromkeys(("model", "model_size", "flavor"), OurKey("model.preset")),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "base_model", "hf_assets_path"),
                    OurKey("model.pretrained")),
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "num_hidden_layers"), OurKey("model.layers")),
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embed_dim"), OurKey("model.hidden")),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "num_attention_heads"), OurKey("model.heads")),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
    OurKey("model.kv_heads")),
    **dict.fromkeys(("ffn_dim", "d_ff", "intermediate_size", "ffn_hidden_size", "ffn_size"),
    OurKey("model.ffn")),
    **dict.fromkeys(("vocab_size", "vocab", "padded_vocab_size"), OurKey("model.vocabulary")),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), OurKey("model.max_positions")),
    **dict.fromkeys(("num_experts", "n_experts", "num_local_experts", "n_routed_experts"),
    OurKey("model.experts")),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_router_topk"),
    OurKey("model.experts_per_token")),
    **dict.fromkeys(("tie_word_embeddings", "tie_embeddings"), OurKey("model.tied")),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), OurKey("model.norm_epsilon")),
    **dict.fromkeys(("sliding_window", "window_size"), OurKey("model.window")),
}  # fmt: skip
"""By the name that other programs use, in small letters and with _ for -."""

OTHER_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8",
    "fp32": "float32",
    "fp64": "float64",
}
"""Names of dtypes in other programs, and ours: of precisions and of codecs alike."""


def dtype_meant(key: str, value: object, refusal: str) -> str:
    """The end of a message about a dtype by the name of another program: what to write, if the refusal lists
    it."""
    ours = OTHER_DTYPES.get(value) if isinstance(value, str) else None
    return f". Write {key} = {ours!r}" if ours and re.search(rf"\b{ours}\b", refusal) else ""


def our_key(name: str, section: str = "") -> OurKey | None:
    """What a key of another name, or of another section, is called here; None where nothing is surely meant
    by it.

    `section` is where it was written. A key of that section comes before one of the same name elsewhere.
    """
    word = name.lower().replace("-", "_")
    word = (
        f"{section}_{word}" if f"{section}_{word}" in OTHER_NAMES else word
    )  # checkpoint.interval: checkpoint_interval
    here = keys_of(section) if section in SECTIONS else {}
    if (meant := _called(word)) and (key := meant.key.partition(".")[2]) in here:
        return meant._replace(key=f"{section}.{key}")
    if near := _close(word, here, SURE):
        return OurKey(f"{section}.{near}")
    keys = [key for other in SECTIONS for key in keys_of(other)]
    names = [
        name for name, meant in OTHER_NAMES.items() if meant.key
    ]  # a mere note would be wrong for another word
    return meant or ((likely := _close(word, [*keys, *names], SURE)) and _called(likely)) or None


def _called(word: str) -> OurKey | None:
    """What is called so by another program, or in the first section that has such a key."""
    homes = [OurKey(f"{home}.{word}") for home in SECTIONS if word in keys_of(home)]
    return OTHER_NAMES.get(word) or (homes[0] if homes else None)


def suggestion(name: str, section: str, known: Iterable[str] | None = None) -> str:
    """The end of a message about a key that its section does not have: what was meant, or all keys of the
    section. `known` are its keys, where that depends on what else is in it."""
    known = list(keys_of(section) if known is None else known)
    if meant := our_key(name, section):
        home, _, key = meant.key.partition(".")
        if home != section or key in known:
            return f". {meant}"
    return did_you_mean(name, known, f"{section}.")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown word: the most similar one that is known, or all of them."""
    known = list(known)
    close = _close(word, known, LIKELY)
    return f". Did you mean {prefix}{close}?" if close else f"; known are: {', '.join(known)}"


def _close(word: str, known: Iterable[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
