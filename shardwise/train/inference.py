"""Inference with a trained model on one device: it continues texts and answers questions.

The model comes from a checkpoint of any layout (each tensor is put together from its pieces), or from a
Hugging Face folder. It computes in the most frequent dtype of the stored weights, or in float32 if that is
float16. In float32 and bfloat16 the transformers library gives the same output.

The tokenizer is that of the model. If the model came from a Hugging Face folder, its checkpoints contain the
files of that folder. They give the chat template, the tokens that begin a prompt, and the ids that end an
answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.folder import saved_model
from shardwise.checkpoint.huggingface_files import as_files, files_of_checkpoint
from shardwise.checkpoint.pretrained import OUR_DTYPES, check_tokenizer, open_folder
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config import Config, Model, Train
from shardwise.config.pretrained_folder import CONFIG, TOKENIZER, file_of, tokenizer_settings
from shardwise.data import Tokenizer, load_tokenizer
from shardwise.data.chat import FILE as TEMPLATE
from shardwise.data.chat import ChatTemplate, Message, spelling
from shardwise.data.prepare import tokenizer_of_run
from shardwise.data.tokenizer import as_text
from shardwise.errors import UserError
from shardwise.files import parse_json, read_bytes
from shardwise.mesh import local_gpus
from shardwise.models import CachedLogits, NextLogits, Transformer, attention_backends, continuation
from shardwise.parallel import build_plain
from shardwise.parallel.apply import allocate
from shardwise.plans import ModelSpec
from shardwise.plurals import counted

GENERATION_CONFIG = "generation_config.json"
AFTER = 8
"""Number of tokens of the prompt that are decoded together with a continuation, as its context."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a continuation are chosen."""

    max_tokens: int
    temperature: float
    """0: always take the most likely token."""
    seed: int


@dataclass(frozen=True)
class TextFormat:
    """How texts become token ids and back, for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: frozenset[int]
    """Ids that end an answer."""
    begins: bool
    """Whether the tokenizer adds its special tokens at the beginning of a prompt. A model that was trained
    here from scratch has never seen them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights and its tokenizer."""

    name: str
    model: Model
    step: NextLogits
    text_format: TextFormat

    def go_on(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yield the continuation of a text, piece by piece."""
        tokenizer, begins = self.text_format.tokenizer, self.text_format.begins
        ids = tokenizer.encode_prompt(prompt) if begins else tokenizer.encode_batch([prompt])[0]
        if not len(ids):
            raise UserError("--prompt: an empty text; give at least one character to go on from")
        return self._generate(ids.tolist(), sampling, "--prompt", context=True, ends=self.text_format.ends)

    def answer(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        """Yield the assistant's next message, piece by piece."""
        assert self.text_format.template is not None, "asked for before"
        written = self.text_format.template.write(messages, generation_prompt=True)
        ids, _ = self.text_format.tokenizer.encode_with_offsets([written])[0]
        return self._generate(
            ids.tolist(), sampling, "the conversation", context=False, ends=self._ends_of_answers
        )

    @cached_property
    def _ends_of_answers(self) -> frozenset[int]:
        """The ids that end a text, and the id that the template puts after an answer, if it is a single one:
        a model that was trained with the template ends its answers with it, whatever other settings say."""
        template = self.text_format.template
        assert template is not None, "asked for before"
        ids, _ = self.text_format.tokenizer.encode_with_offsets([template.mark_after_answers()])[0]
        return self.text_format.ends | (set(ids.tolist()) if len(ids) == 1 else set())

    def check_chat(self) -> None:
        """Refuse a model without a chat template."""
        if self.text_format.template is None:
            raise UserError(
                f"--chat: {self.name} has no chat template ({TEMPLATE}, or `chat_template` in "
                f"tokenizer_config.json), which says "
                "how a conversation is written; put one there, or use --prompt"
            )

    def _generate(
        self, ids: list[int], sampling: Sampling, what: str, context: bool, ends: frozenset[int]
    ) -> Iterator[str]:
        """Yield the text of the tokens that the model generates after these ids.

        `what` names the ids in messages. `context` says whether the new text continues theirs, so that it is
        decoded together with the last of them.
        """
        room = self.model.max_positions - len(ids)
        if room < 1:
            most = f"model.max_positions is {self.model.max_positions}"
            raise UserError(
                f"{what}: {counted(len(ids), 'token')}, and {most}; make it shorter, or begin anew"
            )
        if (largest := max(ids)) >= self.model.vocabulary:
            raise UserError(
                f"{what}: has the token {largest}, of a model of {self.model.vocabulary}: its tokenizer is "
                f"another"
            )
        new = continuation(
            self.step,
            ids,
            min(sampling.max_tokens, room),
            max_positions=self.model.max_positions,
            temperature=sampling.temperature,
            seed=sampling.seed,
            ends=ends,
        )
        return as_text(self.text_format.tokenizer, new, ids[-AFTER:] if context else ())


def load_folder(folder: Path) -> LoadedModel:
    """Return the model of a Hugging Face folder."""
    pretrained = open_folder(folder)
    check_tokenizer(pretrained)
    dtypes = [getattr(torch, OUR_DTYPES[tensor.dtype]) for tensor in pretrained.stored.values()]
    step = _ready(str(folder), pretrained.model, dtypes, pretrained.read)
    return LoadedModel(str(folder), pretrained.model, step, _text_format_of_folder(folder))


def load_checkpoint(address: str) -> LoadedModel:
    """Return the model of a checkpoint."""
    contents = Contents.open(address)
    model = saved_model(contents.manifest, contents.address)
    text_format = _text_format(contents)
    contents.check()
    keys = [key for key in contents.tensors if key.is_model and not key.is_float8_history]
    dtypes = [getattr(torch, contents.tensors[key].dtype) for key in keys]
    read = lambda: ((key.name, contents.read(key)) for key in keys)  # noqa: E731
    step = _ready(address, model, dtypes, read)
    return LoadedModel(address, _with_trained_length(model, contents), step, text_format)


_COMPUTED: Mapping[torch.dtype, dict[str, str]] = {
    torch.float64: {"precision": "float64"},
    torch.bfloat16: {"precision": "bfloat16", "state_dtype": "bfloat16"},
}
"""The settings that compute in each dtype; for other dtypes the default, float32."""


def _with_trained_length(model: Model, contents: Contents) -> Model:
    """Return the model limited to the run's sequence length if it is a user's module, which was called with
    such sequences only, and may fail with longer ones."""
    length = contents.manifest.data.get("sequence_length")
    shorter = model.module is not None and isinstance(length, int) and length < model.max_positions
    return model.model_copy(update={"max_positions": length}) if shorter else model


def _ready(
    name: str, model: Model, dtypes: list[torch.dtype], read: Callable[[], Iterable[tuple[str, Tensor]]]
) -> NextLogits:
    """Return the function that computes logits, with the model and its weights on this device."""
    if model.is_of_program:
        raise UserError(
            f"{name}: a program prepared this model, and only the program knows how it is called; write its "
            "weights to a file with engine.export(path), and load them in code of your own"
        )
    device = torch.device("cuda" if local_gpus() else "cpu")
    train: dict[str, Any] = dict(_COMPUTED.get(max(set(dtypes), key=dtypes.count), {}))
    module = build_plain(ModelSpec.of(Config(model=model, train=Train(**train))))
    allocate(module, device)
    _assign(name, module, read())
    module.eval()
    uncached = _Uncached(module, model, device)
    step: NextLogits = CachedLogits(module, device) if isinstance(module, Transformer) else uncached
    return _with_attention_backends(step, device)


@torch.no_grad()
def _assign(name: str, module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    state = module.state_dict(keep_vars=True)
    missing = {key for key, _ in module.named_parameters()}
    for key, value in weights:
        if key not in state or state[key].shape != value.shape:
            raise UserError(
                f"{name}: {key} is no part of the model that it says it holds, or of another shape"
            )
        state[key].copy_(value)
        missing.discard(key)
    if missing:
        raise UserError(f"{name} lacks {sorted(missing)[0]} of the model that it says it holds")


def _with_attention_backends(step: NextLogits, device: torch.device) -> NextLogits:
    def run(tokens: Tensor) -> Tensor:
        with attention_backends(device.type):
            return step(tokens)

    return run


@dataclass(frozen=True)
class _Uncached:
    """Logits of a user's module, which gets the whole text again for each token."""

    module: nn.Module
    model: Model
    device: torch.device

    def __call__(self, tokens: Tensor) -> Tensor:
        try:
            logits: Tensor = self.module(tokens.to(self.device), logits_at=tokens.shape[1] - 1)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"model.module = {self.model.module!r}: cannot generate, because forward(inputs, None) "
                f"fails: "
                f"{type(error).__name__}: {error}. It must return logits (batch, sequence, vocabulary) where "
                f"it gets no targets"
            ) from error
        return logits


def _text_format(contents: Contents) -> TextFormat:
    """Return the tokenizer, the chat template and the end ids of a checkpoint: those of the Hugging Face
    files that it carries, or else those of the run's data."""
    if files := as_files(files_of_checkpoint(contents)):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).parent.mkdir(exist_ok=True)
                (Path(folder) / name).write_bytes(content)
            if TOKENIZER in files:
                text_format = _text_format_of_folder(Path(folder))
                # The job may have ended documents by another token.
                chosen = contents.manifest.data.get("end_of_document")
                end = (
                    load_tokenizer(Path(folder), chosen).end
                    if isinstance(chosen, str)
                    else text_format.tokenizer.end
                )
                return replace(text_format, ends=text_format.ends | {end})
    tokenizer = _as_trained(contents)
    return TextFormat(tokenizer, tokenizer.find_template(), frozenset({tokenizer.end}), begins=False)


def _as_trained(contents: Contents) -> Tokenizer:
    name, end = tokenizer_of_run(contents.manifest.data)
    if name is None:
        raise UserError(f"{contents.address} names no tokenizer, so the model cannot be asked in words")
    return load_tokenizer(name, end)


def _text_format_of_folder(folder: Path) -> TextFormat:
    """Return the tokenizer, the chat template and the end ids of a Hugging Face folder."""
    ends = _ends(folder)
    end = spelling(tokenizer_settings(folder).get("eos_token"))
    tokenizer = load_tokenizer(file_of(folder, TOKENIZER), end or next(iter(ends), None))
    return TextFormat(tokenizer, tokenizer.find_template(), frozenset({*ends, tokenizer.end}), begins=True)


def _ends(folder: Path) -> list[int]:
    """Return the ids that end a text: those of generation_config.json, else those of config.json."""
    for name in (GENERATION_CONFIG, CONFIG):
        with suppress(FileNotFoundError):
            value = parse_json(read_bytes(file_of(folder, name)), folder / name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            if ids := [identifier for identifier in values if isinstance(identifier, int)]:
                return ids
    return []
