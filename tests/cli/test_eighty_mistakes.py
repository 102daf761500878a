"""What people get wrong in their first hour: each is answered by one message and status 2, and leaves nothing
behind.

The command runs in this process up to where it would start a worker; that it gets there is the failure.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.observe import sinks
from shardwise.train import launch

TEXT = """
[data]
source = "text.txt"
sequence_length = 64
[train]
steps = 2
global_batch = 8
"""
JOB = '[model]\npreset = "bytes-400k"\n' + TEXT
THEIRS = {"model_type": "llama", "vocab_size": 300, "hidden_size": 8, "intermediate_size": 12,
"num_hidden_layers": 1,
          "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a person has before the first mistake."""
    files = {
        "job.toml": JOB,
        "theirs.toml": '[model]\npretrained = "theirs"\n' + TEXT,
        "theirs/config.json": json.dumps(THEIRS),
        "theirs/vocab.json": "{}",
        "cut/config.json": json.dumps(THEIRS),
        "cut/model.safetensors": b"\xff\0\0\0\0\0\0\0{",
        "outside.toml": "steps = 3\n" + JOB,
        "listed/config.json": "[]",
        "broken.toml": "[train\nsteps = 2\n",
        "latin.toml": b"[train]\nsteps = 2 # d\xe9j\xe0\n",
        "text.txt": "To be, or not to be, that is the question.\n" * 100,
        "empty.txt": "",
        "blank.jsonl": "\n\n",
        "short.txt": "To be.\n",
        "latin.txt": b"d\xe9j\xe0 vu\n" * 100,
        "broken.jsonl": '{"text": "To be"}\n' * 100 + '{"text": \n',
        "content.jsonl": json.dumps({"content": "To be, or not to be"}) + "\n",
        "list.jsonl": '["To be"]\n',
        "numbers.jsonl": '{"text": 7}\n',
        "data.csv": "text\nTo be\n",
        "broken.json": "{",
        "tokenizer.json": '{"version": "1.0"}',
        "model.py": "class Other:\n    pass\n",
        "syntax.py": "class Model(:\n",
        "notes.md": "# notes\n",
        "cluster.toml": "[device]\nname = 'x'\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: pytest.fail("a server was started"))
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("workers were started"))
    return tmp_path


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, every folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


TRAIN = [
    # words that are misspelt, or of another kind
    ("train.stpes=3", "Did you mean train.steps?"),
    ("trian.steps=3", "[trian]: unknown section. Did you mean train?"),
    ("steps=3", "write it as section.key=value, here train.steps=3"),
    (".steps=3", "override '.steps=3': write it as section.key=value"),
    ("train.steps", "write it as section.key=value"),
    ("--workers=two", "valid int"),
    ("--wrokers=2", "No such option"),
    ("--steps 10", "--steps 10: not an option; write train.steps=10"),
    ("--max_steps=10 --lr 1e-3", "--lr 1e-3: not an option; write train.learning_rate=1e-3"),
    ("--train.steps=10", "--train.steps=10: not an option; write train.steps=10"),
    ("--bf16 --seed 3", "--bf16: not an option; write train.precision=bfloat16"),
    ("--num-train-epochs 3", "--num-train-epochs 3: not an option; the length of a run is train.steps"),
    ("train.lr=1e-3", "unknown key. Did you mean train.learning_rate?"),
    ("train.compress=int8", "unknown key. Did you mean layout.compression?"),
    ("train.steps=many", "valid integer"),
    ("train.steps=1.5", "train.steps = 1.5"),
    ("train.steps=0", "greater than or equal to 1"),
    ("train.steps=-1", "greater than or equal to 1"),
    ("train.steps=1e3", "train.steps = 1000.0"),
    ("train.steps=true", "valid integer"),
    ("train.learning_rate=0", "greater than 0"),
    ("train.learning_rate=fast", "valid number"),
    ("train.learning_rate=nan", "finite number"),
    ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: too few values"),
    ("optimizer.betas=[0.9, 0.95, 0.99]", "optimizer.betas"),
    ("optimizer.betas=[0.9, 1.0]", "at least 0 and below 1"),
    ("optimizer.betas=0.9", "optimizer.betas = 0.9"),
    ("train.clip=0", "greater than 0"),
    ("train.precision=fp16", "'float16'"),
    ("train.precision=bf16", "'bfloat16'"),
    ("train.schedule=cosin", "'cosine'"),
    ("train.recompute=2.0", "between 0"),
    ("train.state_dtype=float64", "only with train.precision"),
    ("train.compile=yes", "train.compile = 'yes'"),
    ("train.seed=-1", "greater than or equal to 0"),
    ("train.driver=servers", "'server'"),
    ("run.program=model.py:Other train.driver=hogwild", "train.driver = 'hogwild': cannot run a program"),
    ("optimizer.name=adam", "'adamw'"),
    # models that cannot be
    ("model.preset=lama3-8b", "Did you mean llama3-8b?"),
    ("model.preset=llama", "unknown preset"),
    ("model.heads=3", "model.kv_heads = 2: does not divide model.heads = 3"),
    ("model.head_dim=31", "even head_dim"),
    ("model.pretrained=''", "model.pretrained = '': string should have at least 1 character"),
    ("model.preset=none", "write model.preset= with nothing after it to leave it out"),
    ("model.hidden=0", "greater than or equal to 1"),
    ("model.layers=two", "valid integer"),
    ("model.vocabulary=100", "the tokenizer has 257 ids"),
    ("model.experts=4", "model.experts_per_token = 0"),
    ("model.experts_per_token=2", "no effect without experts"),
    ("model.hidden=100000 model.layers=100", "GiB on each device"),
    ("model.module=model.py", "write it as file.py:Class"),
    ("model.module=mine.py:Model", "no such file"),
    ("model.module=model.py:Model", "has no class or function Model; it has Other"),
    ("model.module=syntax.py:Model", "is not Python"),
    ("model.module=notes.md:Model", "must end in .py"),
    # data that are not there, or not text
    ("data.source=nowhere.txt", "no such file or folder"),
    ("data.source=nowhere/*.txt", "no files in it"),
    ("data.source=nothing", "no files in it"),
    ("data.source=''", "empty path"),
    ("data.source=", "data.source: missing"),
    ("data.source=empty.txt", "no text in it"),
    ("data.source=blank.jsonl", "no text in it"),
    ("data.source=short.txt", "longer than the data"),
    ("data.source=latin.txt", "is not UTF-8 text"),
    ("data.source=broken.jsonl", "line 101: not valid JSON"),
    ("data.source=content.jsonl", "content"),
    ("data.source=list.jsonl", "not an object"),
    ("data.source=numbers.jsonl", "text"),
    ("data.source=pipe", "is not a regular file"),
    ("data.source=/dev/zero", "is not a regular file"),
    ("data.sources=[{path='text.txt'}]", "data.source and data.sources are both given"),
    ("data.tokenizer=nowhere.json", "does not exist"),
    ("data.tokenizer=broken.json", "is not a Hugging Face tokenizer.json"),
    ("data.tokenizer=tokenizer.json", "is not a Hugging Face tokenizer.json"),
    ("data.tokenizer=gpt2", "does not exist"),
    ("data.tokenizer=nothing", "does not exist"),
    ("data.end_of_document=</s>", "bytes have an end of their own"),
    ("data.cache=text.txt", "text.txt is not a folder. Give another, for example data.cache=.shardwise/data"),
    ("data.cache=''", "data.cache = ''"),
    (
        "data.sequence_length=4096",
        "model.max_positions = 2048; shorten the sequence or raise model.max_positions",
    ),
    ("data.held_out=1", "less than 1"),
    # layouts that cannot be
    ("layout.data=3", "train.global_batch = 8: does not divide over 3"),
    ("layout.data=0", "layout.data = 0"),
    (
        "layout.tensor=3",
        "has 1 problem: layout.tensor = 3: does not divide model.heads = 4, and heads stay whole; use one of "
        "1, 2, 4",
    ),
    (
        "layout.expert=3 model.preset=moe-tiny",
        "has 1 problem: layout.expert = 3: does not divide model.experts = 8; use one of",
    ),
    ("layout.pipeline=3", "at most 2 stages"),
    ("layout.context=3", "data.sequence_length = 64"),
    ("layout.expert=2", "no experts"),
    ("layout.zero=4", "layout.zero = 4"),
    ("layout.dp=2 layout.data=2", "data is given twice"),
    ("layout.data=4 --workers=2", "data 4 = 4 devices"),
    ("layout.replica=2 --workers=3", "does not divide 3"),
    ("--workers=12 train.global_batch=4", "give --workers 8"),
    ("--workers=100000", "--workers"),
    ("--workers=2 --max-workers=4", "this machine starts 2"),
    ("layout.data=2 --min-workers=3 --max-workers=2", "--min-workers 3"),
    ("--workers=0", "--workers"),
    ("layout=automatic", "write it as section.key=value"),
    ("layout.compression=zip", "layout.compression"),
    ("layout.offload=true layout.zero=0", "only sharded states"),
    ("train.micro_batch=3", "train.micro_batch = 3"),
    ("train.global_batch=7 layout.data=2", "train.global_batch = 7"),
    # folders, checkpoints, clusters, extras
    ("run.folder=''", "run.folder"),
    ("run.folder=text.txt", "text.txt is not a folder"),
    ("run.folder=/dev/null/run", "/dev/null is not a folder"),
    ("run.folder=/proc/run", "run.folder = '/proc/run': cannot be written"),
    ("checkpoint.folder=text.txt", "text.txt is not a folder"),
    ("checkpoint.folder=nosuch://x/y", "checkpoint.folder = 'nosuch://x/y'"),
    ("checkpoint.folder=memory://x layout.data=2", "workers do not share their memory"),
    ("checkpoint.resume=nowhere", "nowhere"),
    ("checkpoint.every=-1", "greater than or equal to 0"),
    ("cluster.preset=h1000x8", "cluster.preset = 'h1000x8': unknown"),
    ("cluster.preset=h100x9", "not whole nodes of 8"),
    ("cluster.file=nowhere.toml", "nowhere.toml"),
    ("cluster.file=cluster.toml", "cluster.toml"),
    ("cluster.preset=h100 cluster.file=cluster.toml", "both given"),
    ("observe.wandb=project", "pip install 'shardwise[wandb]'"),
    ("observe.name=third", "no effect without observe.wandb or observe.mlflow"),
    ("observe.wandb_entity=team", "no effect without observe.wandb"),
    ("observe.callbacks=['nowhere.py:Notify']", "no such file"),
    ("observe.callbacks=['callbacks.py']", "write it as file.py:Class"),
    ("server.servers=2", "no effect without train.driver"),
    ("local.groups=4", "no effect without train.driver"),
    ("recovery.step_attempts=0", "greater than or equal to 1"),
]

OTHERS = [
    ("", "Usage"),
    ("tarin job.toml", "No such command"),
    ("train", "Missing argument"),
    ("train missing.toml", "new demo` writes one to begin with"),
    ("train outside.toml", "steps = 3: a key outside of a section. Did you mean train.steps"),
    ("train broken.toml", "broken.toml is not valid TOML"),
    ("train latin.toml", "latin.toml is not valid TOML"),
    ("train nothing", "is a folder"),
    ("train pipe", "is not a regular file"),
    ("train text.txt", "text.txt is not valid TOML"),
    ("train theirs.toml data.tokenizer=bytes", "model.pretrained: theirs has no weights"),
    (
        "train theirs.toml data.tokenizer=bytes model.pretrained=cut",
        "model.pretrained: cut/model.safetensors cannot be read",
    ),
    ("train theirs.toml model.pretrained=Qwen/Qwen2-0.5B", "`hf download NAME --local-dir FOLDER`"),
    ("train theirs.toml model.pretrained=listed", "listed/config.json: []: input should be"),
    ("plan job.toml --scale=eight cluster.preset=h100x8", "--scale eight: give device counts"),
    ("plan job.toml --scale=0 cluster.preset=h100x8", "--scale 0: give device counts"),
    ("plan job.toml --maximise=speed cluster.preset=h100x8", "--maximise speed: give sequence or batch"),
    ("plan job.toml --scale=8 --fewest cluster.preset=h100x8", "one question at a time"),
    ("plan job.toml --days=-3 cluster.preset=h100x8", "--days -3: give a number above 0"),
    ("plan job.toml --compute-budget=0 cluster.preset=h100x8", "--compute-budget 0"),
    ("plan job.toml --compute-budget=1e20 --days=3 cluster.preset=h100x8", "not both"),
    ("plan job.toml --storage-gb-per-s=0 cluster.preset=h100x8", "--storage-gb-per-s 0"),
    ("plan job.toml --html=nothing cluster.preset=h100x8", "--html nothing: is a folder"),
    ("plan job.toml --html=nowhere/x.html cluster.preset=h100x8", "cannot be written"),
    (
        "plan job.toml --schedule --svg=nowhere/x.svg layout.pipeline=2",
        "--svg nowhere/x.svg: cannot be written",
    ),
    ("plan job.toml cluster.preset=h1000x8", "unknown"),
    ("verify job.toml --dtype=fp8", "--dtype fp8: not known"),
    ("verify job.toml --sabotage=everything", "--sabotage everything: not known"),
    ("verify job.toml --against=me", "--against me: not known"),
    ("verify job.toml data.source=nowhere.txt", "no such file or folder"),
    ("drill job.toml --faults=fire", "--faults fire"),
    ("drill job.toml --faults=", "--faults : names none; use some of"),
    ("report nowhere", "no such run folder"),
    ("report text.txt", "text.txt: no such run folder"),
    ("report nothing", "no metrics yet"),
    ("data prepare nowhere.txt shards", "no such file or folder"),
    ("data prepare pipe shards", "is not a regular file"),
    ("data prepare text.txt nothing --tokenizer=nowhere.json", "does not exist"),
    ("data prepare latin.txt shards", "is not UTF-8 text"),
    ("checkpoint list nowhere", "nowhere"),
    ("checkpoint export nothing out", "nothing"),
    ("new nothing", "is there already"),
    ("new demo --template=chatbot", "Invalid value"),
    ("config show job.toml train.stpes=1", "Did you mean train.steps?"),
]


def answer(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The status and the words of a command."""
    words = line.split(" ") if "[" not in line else line.split(" ", 2)
    monkeypatch.setattr(sys, "argv", ["shardwise", *filter(None, words)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.err + said.out


@pytest.mark.parametrize(
    ("line", "words"),
    [*((f"train job.toml {line}", words) for line, words in TRAIN), *OTHERS],
    ids=lambda text: text or "nothing",
)
def test_a_mistake_has_one_message_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    before = everything(folder)
    status, said = answer(line, capsys, monkeypatch)
    assert (status, "Traceback" in said) == (2, False), said
    assert words in " ".join(said.split()), said
    assert said.lower().count("error:") == 1 or "Usage" in said, said
    assert everything(folder) == before


def test_mistakes_of_every_kind_are_in_one_list(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "train job.toml train.stpes=1 data.source=pipe data.tokenizer=nowhere.json run.folder=text.txt "
        "observe.wandb=x "
    )
    status, said = answer(line + "layout.data=4 --workers=2", capsys, monkeypatch)
    found = (
        "train.stpes",
        "not a regular file",
        "nowhere.json",
        "not a folder",
        "wandb",
        "4 devices, but 2 are there",
    )
    assert (status, [words for words in ("has 6 problems", *found) if words not in said]) == (2, [])
    status, said = answer(line + "model.module=model.py:Model", capsys, monkeypatch)
    assert (status, "it has Other" in said) == (2, True)
    line = (
        "train job.toml data.end_of_document=</s> checkpoint.folder=nosuch://x run.folder=/proc/x "
        "data.cache=text.txt "
    )
    status, said = answer(line + "train.stpes=1", capsys, monkeypatch)
    found = ("data.end_of_document", "checkpoint.folder", "run.folder", "data.cache", "train.stpes")
    assert (status, [words for words in ("has 5 problems", *found) if words not in said]) == (2, [])
    status, said = answer("train theirs.toml data.sequence_length=65", capsys, monkeypatch)
    found = (
        "theirs has no tokenizer.json",
        "theirs has no weights",
        "model.max_positions = 64; shorten the sequence\n",
    )
    assert (status, [words for words in ("has 3 problems", *found) if words not in said]) == (2, [])
    status, said = answer(
        "plan job.toml --maximise=speed --days=0 train.stpes=1 --html=nothing", capsys, monkeypatch
    )
    assert "job.toml has 6 problems" in said


def test_wrong_names_of_float8_products_do_not_wait_for_the_heads_to_be_mended(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "float8.toml").write_text(
        JOB + 'precision = "float8"\nfloat8_leave_out = ["x", "y", "*.query"]\n'
    )
    line = "train float8.toml model.heads=5 model.hidden=100 observe.wandb=x observe.tensorboard=true"
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    status, said = answer(line, capsys, monkeypatch)
    found = (
        "model.kv_heads = 2: does not divide model.heads = 5",
        "train.float8_leave_out: 'x' is the name of no product",
        "train.float8_leave_out: 'y' is the name of no product",
        "pip install 'shardwise[wandb]'",
        "pip install 'shardwise[tensorboard]'",
    )
    assert (status, [words for words in ("has 5 problems", *found) if words not in said]) == (2, []), said


def test_records_that_cannot_be_read_are_named_all_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = json.dumps({"text": "To be, or not to be"}), '{"text": 7}'
    (folder / "some.jsonl").write_text("\n".join([good, bad, good, "{", good]) + "\n")
    before = everything(folder)
    status, said = answer("train job.toml data.source=some.jsonl", capsys, monkeypatch)
    assert (status, "line 2: field 'text' holds int" in said, "line 4: not valid JSON" in said) == (
        2,
        True,
        True,
    ), said
    assert everything(folder) == before
    (folder / "some.jsonl").write_text("\n".join([bad, "{", good]) + "\n")
    status, said = answer("train job.toml data.source=some.jsonl train.stpes=1", capsys, monkeypatch)
    assert (status, "has 3 problems" in said) == (2, True), said
