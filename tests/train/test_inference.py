"""A trained model says on one device what transformers makes it say, from whatever layout's checkpoint it
comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from typer.testing import CliRunner, Result
from warm import Server

from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.cli.app import app
from shardwise.data.tokenizer import as_text, load_tokenizer
from shardwise.errors import UserError
from shardwise.models import continuation
from shardwise.train.inference import Sampling, load_checkpoint, load_folder

transformers = pytest.importorskip("transformers")

GREEDY = Sampling(max_tokens=24, temperature=0, seed=0)
END, BEGIN = "<|im_end|>", "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + ':' + message.content + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SHAPE = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
"num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 257,
         "eos_token_id": 256}  # fmt: skip
GPT2 = {
    "vocab_size": 260,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 257,
    "eos_token_id": 256,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": 7}),
    "gemma2": ("Gemma2", {**SHAPE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", GPT2),
    "mixtral": ("Mixtral", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Bytes, an end and a beginning, which its rules put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens([END, BEGIN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 257)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    more = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **more}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a small model of a family, drawn so that what it says is not always the same token."""

    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp("model") / family
        name, shape = FAMILIES[family]
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**shape))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 and "embed" not in name:
                    weight.mul_(8)
        model.save_pretrained(path)
        write_tokenizer(path)
        return path

    return make


def theirs(folder: Path, ids: list[int], count: int = 24) -> list[int]:
    """What transformers says after these ids, up to the end."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        said: Tensor = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return [token for token in said[0, len(ids) :].tolist() if token not in (256,)]


def text_of(folder: Path, ids: list[int]) -> str:
    return str(transformers.AutoTokenizer.from_pretrained(folder).decode(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_says_what_transformers_makes_it_say(made: Callable[[str], Path], family: str) -> None:
    folder = made(family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs(folder, tokenizer("the quick brown fox")["input_ids"])
    assert len(set(expected)) > 3
    assert "".join(load_folder(folder).go_on("the quick brown fox", GREEDY)) == text_of(folder, expected)


JOB = """
[model]
pretrained = "model"
[data]
source = "chat.jsonl"
sequence_length = 64
held_out = 0.1
[train]
steps = 40
global_batch = 16
learning_rate = 1e-2
warmup = 5
[run]
folder = "run"
"""
ASKED = "who?"
ANSWER = "née 中😀"


@pytest.fixture(scope="module")
def run(made: Callable[[str], Path], warm: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was taught one answer on two layouts, one after the other."""
    place = tmp_path_factory.mktemp("taught")
    made("llama").rename(place / "model")
    told = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]}
    (place / "chat.jsonl").write_text((json.dumps(told) + "\n") * 64)
    (place / "job.toml").write_text(JOB)
    for layout in ("layout.tensor=2", "layout.pipeline=2"):
        steps = ["train.steps=20"] if layout == "layout.tensor=2" else []
        done = warm.run("train", "job.toml", layout, "layout.data=1", *steps, cwd=place, environment={})
        assert done.returncode == 0, done.stderr
    return place


def shardwise(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["generate", *words], input=typed)


def test_a_run_on_any_layout_answers_as_it_was_taught_and_its_export_does_so_in_transformers(
    run: Path,
) -> None:
    done = shardwise(str(run / "run"), "--chat", "--temperature", "0", typed=f"{ASKED}\n\n{ASKED}\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == ANSWER
    assert len(done.stdout.splitlines()) == 2
    export_checkpoint(str(run / "run" / "checkpoints" / "step-40"), run / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "exported")
    asked = [{"role": "user", "content": ASKED}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(theirs(run / "exported", ids)) == ANSWER
    prompt = "user:wh"
    expected = text_of(run / "exported", theirs(run / "exported", tokenizer(prompt)["input_ids"]))
    for model in ("run", "run/checkpoints/step-40", "exported"):
        said = shardwise(str(run / model), "--prompt", prompt, "--temperature", "0", "--max-tokens", "24")
        assert said.stdout == expected + "\n", said.output


def test_the_same_seed_says_the_same_and_another_another(run: Path) -> None:
    words = [str(run / "model"), "--prompt", "the", "--temperature", "2", "--max-tokens", "12"]
    first, again, other = (shardwise(*words, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_character_is_shown_once_all_of_its_bytes_are_there() -> None:
    tokenizer = load_tokenizer("bytes")
    coming = iter([*"é中😀!".encode(), 0xC3])
    assert list(as_text(tokenizer, coming)) == ["é", "中", "😀", "!", "\ufffd"]


def test_what_is_remembered_is_only_what_is_still_the_same(made: Callable[[str], Path]) -> None:
    folder = made("mistral")
    step = load_folder(folder).step
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 4, 5], [7], [7]]
    with torch.no_grad():
        one_by_one = [step(torch.tensor([text])).flatten() for text in texts]
        anew = [load_folder(folder).step(torch.tensor([text])).flatten() for text in texts]
    torch.testing.assert_close(torch.stack(one_by_one), torch.stack(anew))


def test_a_text_ends_with_the_first_id_that_ends_it() -> None:
    def successor(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens[0, -1] + 1, 10).float()

    assert list(continuation(successor, [3], 6, max_positions=4, temperature=0, ends={7})) == [4, 5, 6]


def test_an_answer_ends_by_the_mark_of_the_template_whatever_the_settings_say(
    run: Path, tmp_path: Path
) -> None:
    """A base model's settings name a token of its own, and what it learnt here ends answers as the template
    writes them."""
    export_checkpoint(str(run / "run" / "checkpoints" / "step-40"), tmp_path / "exported")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "exported" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 257}))
    settings = tmp_path / "exported" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": BEGIN}))
    done = shardwise(str(tmp_path / "exported"), "--chat", "--temperature", "0", typed=f"{ASKED}\n")
    assert done.stdout == ANSWER + "\n", done.output


def test_what_is_no_text_or_no_number_ends_in_words(run: Path) -> None:
    done = CliRunner().invoke(
        app, ["generate", str(run / "run"), "--chat", "--max-tokens", "2"], input=b"\xff\n"
    )
    assert done.exit_code == 0, done.output
    done = shardwise(str(run / "run"), "--prompt", "a\udcff", "--max-tokens", "2")
    assert done.exit_code == 0, done.output
    refused = shardwise(str(run / "run"), "--prompt", "a", "--seed", str(2**64))
    assert "--seed" in refused.output, refused.exception


def test_a_template_that_came_with_the_data_is_the_models_from_then_on(
    made: Callable[[str], Path], warm: Server, tmp_path: Path
) -> None:
    """A base model has none; the job gives it one by data.tokenizer, be it of data that are prepared
    before."""
    made("gpt2").rename(tmp_path / "model")
    (tmp_path / "told").mkdir()
    write_tokenizer(tmp_path / "model", template=None)
    write_tokenizer(tmp_path / "told")
    told = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(told) + "\n") * 64)
    (tmp_path / "job.toml").write_text(JOB)
    done = warm.run(
        "data", "prepare", "chat.jsonl", "shards", "--tokenizer", "told", cwd=tmp_path, environment={}
    )
    assert done.returncode == 0, done.stderr
    for job in (["data.tokenizer=told", "run.folder=run"], ["data.source=shards", "run.folder=run2"]):
        done = warm.run("train", "job.toml", "train.steps=1", *job, cwd=tmp_path, environment={})
        assert done.returncode == 0, done.stderr
        run = tmp_path / job[-1].removeprefix("run.folder=")
        done = shardwise(str(run), "--chat", "--max-tokens", "2", typed=f"{ASKED}\n")
        assert done.exit_code == 0, done.output
        export_checkpoint(str(run / "checkpoints" / "step-1"), run / "exported")
        tokenizer = transformers.AutoTokenizer.from_pretrained(run / "exported")
        written = tokenizer.apply_chat_template(told["messages"], tokenize=False)
        assert written == f"{BEGIN}user:{ASKED}{END}\nassistant:{ANSWER}{END}\n"


SMALL = """
[model]
layers = 1
hidden = 16
heads = 2
kv_heads = 2
head_dim = 8
ffn = 16
vocabulary = 258
max_positions = 64
[data]
source = "shards"
sequence_length = 32
[train]
steps = 1
global_batch = 4
[run]
folder = "run"
"""


def test_a_model_of_prepared_data_has_their_tokenizer_and_never_that_of_bytes(
    warm: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told").mkdir()
    write_tokenizer(tmp_path / "told")
    (tmp_path / "text.txt").write_text("to be, or not to be\n" * 40)
    (tmp_path / "job.toml").write_text(SMALL)
    words = ["data", "prepare", "text.txt", "shards", "--tokenizer", "told", "--end-of-document", BEGIN]
    for command in (words, ["train", "job.toml"]):
        done = warm.run(*command, cwd=tmp_path, environment={})
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-1")
    text_format = load_checkpoint(checkpoint).text_format
    assert (text_format.ends, text_format.tokenizer.name) == ({257}, "shards/tokenizer.json")
    export_checkpoint(checkpoint, tmp_path / "exported")
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (
        tmp_path / "told" / "tokenizer.json"
    ).read_bytes()
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["eos_token_id"] == 257
    monkeypatch.chdir(tmp_path / "exported")
    with pytest.raises(UserError, match="shards does not exist"):
        load_checkpoint(checkpoint)


OWN = """
from torch import nn
class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257)
    def forward(self, inputs, targets=None):
        logits = self.head(self.embedding(inputs))
        rows = logits.flatten(0, 1)
        return nn.functional.cross_entropy(rows, targets.flatten(), reduction="sum") {otherwise}
"""


def test_a_module_of_ones_own_goes_on_if_it_gives_logits(
    tmp_path: Path, warm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("ab" * 400)
    (tmp_path / "own.py").write_text(OWN.format(otherwise="if targets is not None else logits"))
    (tmp_path / "job.toml").write_text(
        '[model]\nmodule = "own.py:Own"\n[data]\nsource = "text.txt"\nsequence_length = 16\n'
    )
    words = ["train.steps=60", "train.learning_rate=0.05", "run.folder=run"]
    done = warm.run("train", "job.toml", *words, cwd=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    said = shardwise("run", "--prompt", "aba", "--temperature", "0", "--max-tokens", "5")
    assert said.stdout == "babab\n", said.output
    with pytest.raises(UserError, match="17 tokens, and model"):
        load_checkpoint("run/checkpoints/step-60").go_on("a" * 17, GREEDY)
    (tmp_path / "own2.py").write_text(OWN.format(otherwise=""))
    (tmp_path / "job.toml").write_text(
        '[model]\nmodule = "own2.py:Own"\n[data]\nsource = "text.txt"\nsequence_length = 16\n'
    )
    done = warm.run("train", "job.toml", "train.steps=1", "run.folder=mute", cwd=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    refused = shardwise("mute", "--prompt", "aba")
    assert isinstance(refused.exception, UserError)
    assert "own2.py:Own': cannot generate, because forward(inputs, None) fails" in str(refused.exception)


def test_what_cannot_be_asked_is_refused_with_what_to_do(run: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.mkdir()
    for path in (run / "model").iterdir():
        (silent / path.name).write_bytes(path.read_bytes())
    (silent / "tokenizer.json").unlink()
    (tmp_path / "empty-run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty-run" / "config.toml").write_text("")
    cases = {
        (str(silent), "--prompt", "a"): "silent has no tokenizer.json",
        (str(tmp_path / "empty-run"), "--prompt", "a"): "empty-run holds no checkpoint",
        (str(tmp_path / "nowhere"), "--prompt", "a"): "nowhere: no such folder",
        ("a" * 300, "--prompt", "a"): "File name too long. Give a run folder",
        (str(run / "run"),): "give --prompt TEXT",
        (str(run / "run"), "--prompt", "a", "--chat"): "and not both",
        (str(run / "run"), "--prompt", "a" * 200): "--prompt: 201 tokens, and model.max_positions is 128",
    }
    for words, expected in cases.items():
        refused = shardwise(*words)
        assert isinstance(refused.exception, UserError), refused.output
        assert expected in str(refused.exception)
    write_tokenizer(silent, template=None)
    refused = shardwise(str(silent), "--chat", typed="a\n")
    assert "--chat: " in str(refused.exception)
    assert "has no chat template" in str(refused.exception)
