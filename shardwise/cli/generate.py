"""`shardwise generate MODEL`: print what a trained model generates from a prompt or in a conversation, token
by token."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.train.inference import LoadedModel, Sampling

PROMPT = "> "
"""What a terminal shows before a line is typed."""
LARGEST_SEED = 2**63 - 1


def generate(
    model: Annotated[str, typer.Argument(help="A run folder, a step-N folder, or a Hugging Face folder.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer each line of standard input, as a conversation by the model's chat template.",
        ),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="The random seed.")] = 0,
) -> None:
    """Generate text from a prompt, or hold a conversation, with the model of a run (on any layout) or of a
    Hugging Face folder, on one device."""
    from shardwise.data.chat import without_lone_surrogates
    from shardwise.errors import UserError

    if (prompt is None) != chat:
        raise UserError(
            "generate: give --prompt TEXT for a text to continue, or --chat for a conversation, and not both"
        )
    loaded, sampling = _load(model), _sampling(max_tokens, temperature, seed)
    # Bytes that are no text in the terminal's encoding are replaced; they must not end the program.
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if prompt is not None:
        _print_pieces(loaded.go_on(without_lone_surrogates(prompt), sampling))
    else:
        _talk(loaded, sampling)


def _load(model: str) -> LoadedModel:
    """Load a model with its weights.

    What can be refused without torch is refused before torch is imported, because that takes seconds.
    """
    from shardwise.checkpoint.folder import read_manifest, saved_model
    from shardwise.checkpoint.pretrained import check_tokenizer, open_folder
    from shardwise.cli.checkpoint import newest
    from shardwise.config.pretrained_folder import CONFIG
    from shardwise.files import reading
    from shardwise.library.machine import note_links
    from shardwise.library.torch_version import need_torch

    need_torch()
    folder = Path(model)
    advice = "Give a run folder, a step-N folder or a Hugging Face folder first, and the text after --prompt."
    with reading(model, advice):
        is_folder = (folder / CONFIG).is_file()
    if is_folder:
        check_tokenizer(open_folder(folder))
        note_links(folder)
        from shardwise.train.inference import load_folder

        return load_folder(folder)
    address = newest(model)
    saved_model(read_manifest(address), address)
    from shardwise.train.inference import load_checkpoint

    return load_checkpoint(address)


def _sampling(max_tokens: int, temperature: float, seed: int) -> Sampling:
    from shardwise.train.inference import Sampling

    return Sampling(max_tokens, temperature, seed)


def _talk(loaded: LoadedModel, sampling: Sampling) -> None:
    """Answer each line of standard input. The whole conversation so far is the context of each answer."""
    from dataclasses import replace

    loaded.check_chat()
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        answer = _print_pieces(loaded.answer(messages, replace(sampling, seed=sampling.seed + turn)))
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, with a prompt on a terminal."""
    while True:
        if sys.stdin.isatty():
            print(PROMPT, end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _print_pieces(pieces: Iterable[str]) -> str:
    """Print the pieces of a text as they arrive, and return the whole text."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text
