"""Names of settings in other training programs, and the keys of a job that mean the same.

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
"""Similarity (difflib's ratio) above which one word is surely, or likely, a misspelling of another."""
MAX_SHORT = 5
"""Maximum number of letters of a short word. With one letter more or less it is often another word: `mode` is
not `model`, another program's name of a preset."""


class JobKey(NamedTuple):
    """A key of a job that another program calls by another name."""

    key: str
    """The key as section.key; empty if a job has no such key, and the note says what to do instead."""
    value: str = ""
    """The value to write, or a placeholder in capitals; empty: the value that the user gave."""
    note: str = ""
    """How the two keys differ; may be empty."""

    def setting(self, given: str = "VALUE") -> str:
        """Return what to write on the command line, and how the two keys differ."""
        written = f"{self.key}={self.value or given}" if self.key else ""
        return f"{written} ({self.note})" if written and self.note else written or self.note

    def __str__(self) -> str:
        key = f"{self.key} = {self.value}" if self.value else self.key
        return (
            f"Did you mean {key}?{f' ({self.note})' if self.note else ''}"
            if key
            else f"{self.note[0].upper()}{self.note[1:]}"
        )


_ACCUMULATION = JobKey(
    "train.micro_batch",
    "N",
    "the number of micro-batches follows: train.global_batch / devices / train.micro_batch",
)
_EPOCHS = JobKey(
    "",
    "",
    "the length of a run is train.steps: an epoch has (sequences of the data) / train.global_batch steps",
)
_EVERY_STEP = JobKey("", "", "every step is written to metrics.jsonl of run.folder; leave it out")
_NO_LORA = JobKey(
    "", "", "LoRA is not there; leave it out, or freeze weights in a module of your own (docs/sharding.md)"
)
_AUTOMATIC_ATTENTION = JobKey("", "", "the fastest attention that fits is chosen by itself; leave it out")
_ALWAYS_PACKED = JobKey("", "", "documents are always packed; leave it out")
_WORKERS = JobKey("", "", "the number of local workers is an option: --workers N")
_GLOBAL_BATCH = JobKey(
    "train.global_batch",
    "",
    "sequences of a step over all devices; train.micro_batch: of one forward on one device",
)
_WARMUP_STEPS = JobKey("train.warmup", "N", "in steps")
_FINAL_LR = JobKey("train.final_learning_rate", "SHARE", "as a share of the peak")
_BETAS = JobKey("optimizer.betas", "[0.9,0.95]", "both in one list")

_NAMES: tuple[tuple[JobKey, str], ...] = (
    (JobKey("train.learning_rate"), "lr max_lr peak_lr"),
    (_FINAL_LR, "min_lr min_learning_rate min_lr_factor"),
    (JobKey("train.schedule"), "lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_type"),
    (JobKey("train.warmup"), "warmup_steps lr_warmup_iters"),
    (_WARMUP_STEPS, "warmup_ratio lr_warmup_fraction"),
    (JobKey("train.decay"), "decay_steps lr_decay_iters"),
    (_GLOBAL_BATCH, "batch_size global_batch_size train_batch_size"),
    (
        JobKey("train.micro_batch"),
        "micro_batch_size microbatch_size local_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu",
    ),
    (_ACCUMULATION, "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation"),
    (_EPOCHS, "epochs epoch num_epochs num_train_epochs max_epochs"),
    (JobKey("train.steps"), "max_steps train_iters training_steps num_steps total_steps iters"),
    (_NO_LORA, "lora lora_r lora_alpha lora_dropout peft use_peft qlora adapter"),
    (_AUTOMATIC_ATTENTION, "attn_implementation flash_attention use_flash_attn sdp_attention"),
    (_ALWAYS_PACKED, "packing sample_packing"),
    (JobKey("train.driver", "by-speed", "or synchronous: even shares"), "shares"),
    (JobKey("local.sync_every"), "local_steps"),
    (JobKey("optimizer.weight_decay"), "wd l2"),
    (JobKey("train.clip"), "max_grad_norm max_norm gradient_clipping clip_grad grad_clip gradient_clip_val"),
    (JobKey("optimizer.name"), "optim optimizer optimizer_type"),
    (_BETAS, "beta1 beta2 adam_beta1 adam_beta2"),
    (JobKey("optimizer.epsilon"), "eps adam_eps adam_epsilon"),
    (JobKey("train.precision", "bfloat16"), "bf16 bfloat16"),
    (JobKey("train.precision", "float16"), "fp16 float16 half"),
    (JobKey("train.precision", "float8"), "fp8 float8 fp8_format"),
    (JobKey("train.precision"), "dtype torch_dtype mixed_precision mixed_precision_param"),
    (
        JobKey("train.recompute", "full", "or selective, or a number from 0 to 1"),
        "gradient_checkpointing activation_checkpoint activation_checkpointing activation_checkpoint_mode "
        "recompute_granularity recompute_activations",
    ),
    (JobKey("train.compile"), "torch_compile compile_model"),
    (JobKey("train.seed"), "random_seed data_seed"),
    (JobKey("train.evaluate_every"), "eval_steps eval_interval eval_every eval_freq"),
    (_EVERY_STEP, "logging_steps log_interval log_every log_freq"),
    (JobKey("checkpoint.every"), "save_steps save_interval save_every checkpoint_interval checkpoint_every"),
    (JobKey("checkpoint.keep"), "save_total_limit keep_latest_k"),
    (JobKey("checkpoint.resume"), "resume_from_checkpoint resume_from load"),
    (JobKey("checkpoint.background", "true"), "async_save async_mode"),
    (JobKey("run.folder"), "output_dir out_dir output save_dir dump_folder folder"),
    (JobKey("observe.wandb"), "wandb_project project"),
    (JobKey("observe.wandb", "PROJECT"), "report_to"),
    (JobKey("observe.tensorboard", "true"), "enable_tensorboard tensorboard_dir"),
    (
        JobKey("layout.tensor"),
        "tp tensor_parallel tp_size tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    ),
    (
        JobKey("layout.pipeline"),
        "pp pipeline_parallel pp_size pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size",
    ),
    (
        JobKey("layout.context"),
        "cp context_parallel cp_size context_parallel_size context_parallel_degree sequence_parallel_degree",
    ),
    (
        JobKey("layout.expert"),
        "ep expert_parallel ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    ),
    (
        JobKey("layout.data"),
        "dp data_parallel dp_size dp_shard data_parallel_size data_parallel_degree "
        "data_parallel_shard_degree",
    ),
    (JobKey("layout.replica"), "dp_replicate data_parallel_replicate_degree hsdp"),
    (JobKey("layout.zero"), "zero_stage stage zero_optimization"),
    (JobKey("layout.zero", "3"), "fsdp fully_shard"),
    (JobKey("layout.offload", "true"), "cpu_offload offload_optimizer fsdp_offload_params"),
    (JobKey("layout.schedule"), "pipeline_schedule pipeline_parallel_schedule pp_schedule"),
    (JobKey("layout.stages_per_rank"), "virtual_pipeline_model_parallel_size virtual_stages"),
    (JobKey("layout.compression"), "compress gradient_compression grad_compression communication_data_type"),
    (_WORKERS, "gpus num_gpus nproc_per_node num_processes devices n_gpus"),
    (
        JobKey("data.sequence_length"),
        "seq_len seq_length sequence_len max_seq_len max_seq_length max_length block_size context_length",
    ),
    (JobKey("data.source"), "data dataset dataset_path dataset_name data_path train_file train_data"),
    (JobKey("data.text_field"), "dataset_text_field text_column"),
    (JobKey("data.tokenizer"), "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path"),
    (JobKey("data.held_out"), "val_split val_set_size validation_split"),
    (JobKey("model.preset"), "model model_size flavor"),
    (JobKey("model.pretrained"), "model_name_or_path model_name model_path base_model hf_assets_path"),
    (JobKey("model.layers"), "num_layers n_layers n_layer num_hidden_layers"),
    (JobKey("model.hidden"), "hidden_size d_model dim n_embd embed_dim"),
    (JobKey("model.heads"), "num_heads n_heads n_head num_attention_heads"),
    (JobKey("model.kv_heads"), "num_kv_heads n_kv_heads num_key_value_heads num_query_groups"),
    (JobKey("model.ffn"), "ffn_dim d_ff intermediate_size ffn_hidden_size ffn_size"),
    (JobKey("model.vocabulary"), "vocab_size vocab padded_vocab_size"),
    (JobKey("model.max_positions"), "max_position_embeddings n_positions"),
    (JobKey("model.experts"), "num_experts n_experts num_local_experts n_routed_experts"),
    (JobKey("model.experts_per_token"), "num_experts_per_tok moe_top_k moe_router_topk"),
    (JobKey("model.tied"), "tie_word_embeddings tie_embeddings"),
    (JobKey("model.norm_epsilon"), "rms_norm_eps layer_norm_eps norm_eps"),
    (JobKey("model.window"), "sliding_window window_size"),
)
OTHER_NAMES = {name: key for key, names in _NAMES for name in names.split()}
"""Keys of a job by the names of other programs, in small letters and with _ for -."""

OTHER_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8",
    "fp32": "float32",
    "fp64": "float64",
}
"""Our names of precisions and codecs by the names of other programs."""


def dtype_suggestion(key: str, value: object, refusal: str) -> str:
    """Return the end of a message about another program's name of a dtype: our name, if the refusal lists
    it."""
    ours = OTHER_DTYPES.get(value) if isinstance(value, str) else None
    return f". Write {key} = {ours!r}" if ours and re.search(rf"\b{ours}\b", refusal) else ""


def job_key(name: str, section: str = "") -> JobKey | None:
    """Return the key of a job that a name of another program or section surely means; None if there is none.

    `section` is where the name was written. Its keys come before keys of the same name in other sections.
    """
    word = name.lower().replace("-", "_")
    if f"{section}_{word}" in OTHER_NAMES:  # [checkpoint] interval means checkpoint_interval
        word = f"{section}_{word}"
    meant = _named_key(word)
    if section in SECTIONS:
        keys, key = keys_of(section), meant.key.partition(".")[2] if meant else ""
        if meant and key in keys:
            return meant._replace(key=f"{section}.{key}")
        if similar := _most_similar(word, keys, SURE):
            return JobKey(f"{section}.{similar}")
    return meant or _similar_key(word)


def _named_key(word: str) -> JobKey | None:
    """Return the key with this name in another program, or in the first section that has such a key."""
    keys = [JobKey(f"{section}.{word}") for section in SECTIONS if word in keys_of(section)]
    return OTHER_NAMES.get(word) or (keys[0] if keys else None)


def _similar_key(word: str) -> JobKey | None:
    """Return the key whose name, here or in another program, is most similar to a word. A short word is
    compared with our names only, and only with those of about its length."""
    keys = [key for section in SECTIONS for key in keys_of(section)]
    # A note without a key would be wrong for another word.
    names = [name for name, meant in OTHER_NAMES.items() if meant.key]
    if len(word) <= MAX_SHORT:
        keys, names = [key for key in keys if abs(len(key) - len(word)) <= 1], []
    similar = _most_similar(word, [*keys, *names], SURE)
    return _named_key(similar) if similar else None


def suggestion(name: str, section: str, known: Iterable[str] | None = None) -> str:
    """Return the end of a message about an unknown key: the key that was meant, or all keys of the section.

    `known` are the keys of the section, if they depend on its other values.
    """
    known = list(keys_of(section) if known is None else known)
    if meant := job_key(name, section):
        home, _, key = meant.key.partition(".")
        if home != section or key in known:
            return f". {meant}"
    return did_you_mean(name, known, f"{section}.")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown word: the most similar known word, or all of them."""
    known = list(known)
    similar = _most_similar(word, known, LIKELY)
    return f". Did you mean {prefix}{similar}?" if similar else f"; known are: {', '.join(known)}"


def _most_similar(word: str, known: Iterable[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
