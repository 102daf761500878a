"""A model from a Hugging Face folder stays itself: a job takes all from the folder, and an export gives back
what it held."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE
from safetensors.torch import load_file
from warm import Server

from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.folder import check_same_model, read_manifest
from shardwise.checkpoint.huggingface import export_checkpoint
from shardwise.checkpoint.huggingface_files import as_files, file_key, files_of_folder, has_tokenizer
from shardwise.checkpoint.pretrained import import_folder, open_folder
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config import Config, Data, Model, from_tables, read, to_toml
from shardwise.config.pretrained_folder import links_outside
from shardwise.data import Dataset
from shardwise.data.check_data import problems_of_data, unnamed_tokenizer
from shardwise.data.prepare import prepare
from shardwise.data.tokenizer import file_fingerprint
from shardwise.errors import ConfigError, UserError
from shardwise.files import parse_toml
from shardwise.library.check_job import checks_of_proof, weights_problems
from shardwise.plans import choose
from shardwise.train.build import build, keep_files, save, start_from_pretrained
from shardwise.train.resume import checkpoint_folder
from shardwise.train.steps import steps

transformers = pytest.importorskip("transformers")

EPSILON = 9.999999747378752e-06
"""1e-5 that has been a float32: what a folder converted from another format says."""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
OTHERS: dict[str, bytes] = {
    "generation_config.json": b'{"bos_token_id": 1, "eos_token_id": [2, 0],\t"temperature": 0.2}',
    "special_tokens_map.json": b'{"eos_token": "<|im_end|>"}\r\n',
    "chat_template.jinja": TEMPLATE.encode(),
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "LICENSE": b"as it was\n",
    "empty.txt": b"",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model as SmolLM2-Instruct is one: several special tokens, of which the last ends a
    text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("models") / "chat"
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4,
             "num_key_value_heads": 2, "rms_norm_eps": EPSILON, "tie_word_embeddings": True,
             "max_position_embeddings": 128,
             "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(path)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {name: number for number, name in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz .,\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
    "bos_token": "<|im_start|>",
                "model_max_length": 1000000000000000019884624838656}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in OTHERS.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    (path / "pytorch_model.bin").write_bytes(b"weights, and not kept")
    (tmp_path_factory.getbasetemp() / "corpus.txt").write_text("the quick brown fox jumps.\n" * 200)
    return path


def tables(folder: Path, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    at = folder.parents[1]
    base: dict[str, dict[str, Any]] = {
        "model": {"pretrained": str(folder)},
        "data": {"source": str(at / "corpus.txt"), "sequence_length": 16, "cache": str(at / "cache")},
        "train": {"steps": 2, "global_batch": 4},
    }
    return {name: {**base.get(name, {}), **more.get(name, {})} for name in base | more}


def trained(config: Config, kept_from: tuple[str, ...] = ()) -> str:
    """The last checkpoint of a run on one device."""
    training = build(config, choose(config, 1), ALONE)
    start_from_pretrained(training, Path(config.model.pretrained or ""))
    keep_files(training, kept_from)
    list(steps(training))
    return save(training)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".safetensors", ".bin")
    }


def test_a_job_takes_model_tokenizer_and_end_of_documents_from_the_folder(folder: Path) -> None:
    config = from_tables(tables(folder))
    assert (config.model.layers, config.model.hidden, config.model.kv_heads, config.model.vocabulary) == (
        2,
        16,
        2,
        64,
    )
    assert config.model.norm_epsilon == EPSILON
    assert config.model.tied
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert config.data.end_of_document == "<|im_end|>"
    assert Dataset.open(config.data, 0).streams[0].tokens.index.end == 2
    assert from_tables(parse_toml(to_toml(config).encode(), "config.toml")) == config


def test_a_tokenizer_with_an_end_of_its_own_is_taken_with_it(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(
        text.replace("<|endoftext|>", "<over>").replace("<|im_end|>", "<out>")
    )
    source = {
        "source": str(folder.parents[1] / "corpus.txt"),
        "sequence_length": 16,
        "tokenizer": str(tmp_path),
    }
    said = [
        [*problems_of_data(Data.model_validate({**source, "end_of_document": end}), 64)]
        for end in ("<over>", None, "<|im_end|>")
    ]
    assert said[0] == []
    assert ["no end-of-text token" in said[1][0], "data.end_of_document = '<|im_end|>'" in said[2][0]] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("model", "layers", 3, r"model\.layers = 3: .*config\.json says 2"),
        ("model", "norm_epsilon", 1e-5, r"model\.norm_epsilon = 1e-05: .* says 9\.999999747378752e-06"),
        ("model", "vocabulary", 65, r"model\.vocabulary = 65: .* says 64"),
        ("model", "preset", "bytes-2m", r"model\.preset and model\.pretrained are both given"),
        ("model", "module", "mine.py:Mine", r"model\.module and model\.pretrained are both given"),
        ("model", "pretrained", "/nowhere", r"model\.pretrained: /nowhere is not a Hugging Face folder"),
        ("data", "tokenizer", "bytes", r"data\.tokenizer = 'bytes': not that of model\.pretrained"),
    ],
)
def test_what_a_job_says_besides_must_agree_with_the_folder(
    folder: Path, section: str, key: str, value: Any, says: str
) -> None:
    from_tables(tables(folder, model={"layers": 2, "norm_epsilon": EPSILON}, data={"tokenizer": str(folder)}))
    with pytest.raises(UserError, match=says):
        from_tables(tables(folder, **{section: {key: value}}))


@pytest.mark.parametrize("key", ["preset", "module"])
def test_a_folder_beside_a_preset_or_a_module_is_one_problem_with_how_to_leave_either_out(
    folder: Path, tmp_path: Path, key: str
) -> None:
    """Nothing else is said: what else is wrong depends on which of the two is kept."""
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    value = {"preset": "bytes-2m", "module": f"{tmp_path / 'mine.py'}:Mine"}[key]
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\n{key} = "{value}"\n'
        + f'[data]\nsource = "{folder.parents[1] / "corpus.txt"}"\nsequence_length = 16\n'
    )
    with pytest.raises(ConfigError) as refusal:
        read(job, [f"model.pretrained={folder}"], checks=checks_of_proof())
    assert list(refusal.value.problems) == [
        f"model.{key} and model.pretrained are both given; keep one: on the command line, model.{key}= or "
        f"model.pretrained= "
        "leaves it out"
    ]
    config = read(job, [f"model.pretrained={folder}", f"model.{key}="], checks=checks_of_proof())
    assert (config.model.layers, config.model.vocabulary) == (2, 64)


def test_all_that_training_does_not_change_is_exported_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(folder, tmp_path / "mine")
    config = from_tables(
        tables(folder, model={"pretrained": str(mine)}, run={"folder": str(tmp_path / "run")})
    )
    checkpoint = trained(config)
    shutil.rmtree(mine)  # the checkpoint needs it no more
    done = export_checkpoint(checkpoint, tmp_path / "out", dtype="bfloat16")
    assert done.note is None
    assert done.kept == len(files(folder))
    assert files(tmp_path / "out") == files(folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))


def test_another_dtype_is_all_that_changes_in_the_configuration(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, str(tmp_path / "step-0"))
    export_checkpoint(str(tmp_path / "step-0"), tmp_path / "out", dtype="float32")
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert after == {**before, "dtype": "float32"}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_files_go_on_from_an_imported_checkpoint_through_saves(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, str(tmp_path / "step-0"))
    config = from_tables(tables(folder, run={"folder": str(tmp_path / "run")}))
    checkpoint = trained(config, (str(tmp_path / "nothing"), str(tmp_path / "step-0")))
    assert checkpoint.startswith(checkpoint_folder(config))
    export_checkpoint(checkpoint, tmp_path / "out", dtype="bfloat16")
    assert files(tmp_path / "out") == files(folder)


def test_the_files_of_another_tokenizer_are_not_kept(folder: Path, tmp_path: Path) -> None:
    model = from_tables(tables(folder)).model.settings() | {"vocabulary": 257}
    import_folder(folder, str(tmp_path / "step-0"))
    config = from_tables(
        {
            **tables(folder),
            "model": model,
            "run": {"folder": str(tmp_path / "run")},
        }  # of bytes, where nothing is said
    )
    training = build(config, choose(config, 1), ALONE)
    keep_files(training, (str(tmp_path / "step-0"),))
    assert training.folder_files == {}


def test_files_that_belong_to_no_tokenizer_of_the_data_are_not_kept(folder: Path) -> None:
    """Those of a vocab.json and merges.txt say nothing of the ids in the data."""
    kept = files_of_folder(folder)
    own = file_fingerprint((folder / "tokenizer.json").read_bytes())
    assert has_tokenizer(kept, own)
    assert not has_tokenizer(kept, "bytes-257")
    kept.pop(file_key("tokenizer.json"))
    assert not has_tokenizer(kept, own)  # there is a tokenizer_config.json still
    kept.pop(file_key("tokenizer_config.json"))
    assert has_tokenizer(kept, "bytes-257")


def test_a_folder_without_a_tokenizer_is_not_trained_on_bytes_unasked(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    config = from_tables(tables(folder, model={"pretrained": str(bare)}))
    (said,) = unnamed_tokenizer(config.data, config.model.pretrained)
    assert said.startswith(f"model.pretrained: {bare} has no tokenizer.json")
    prepare(str(config.data.source), folder, tmp_path / "shards")
    for given in ({"source": str(tmp_path / "shards")}, {"tokenizer": str(folder)}, {"tokenizer": "bytes"}):
        config = from_tables(tables(folder, model={"pretrained": str(bare)}, data=given))
        assert [*unnamed_tokenizer(config.data, config.model.pretrained)] == []


def as_links(folder: Path, stored: Path, mine: Path) -> None:
    """The files of a folder under numbers in `stored`, and links to them, with their names, in `mine`."""
    stored.mkdir(parents=True)
    for number, name in enumerate([*files(folder), "model.safetensors"]):
        shutil.copy(folder / name, stored / str(number))
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).symlink_to(os.path.relpath(stored / str(number), (mine / name).parent))


def test_a_snapshot_in_the_cache_of_the_hub_is_read_through_its_links_without_a_word(
    folder: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    as_links(folder, repository / "blobs", repository / "snapshots" / "0123")
    (tmp_path / "mine").symlink_to(repository / "snapshots" / "0123")
    assert open_folder(tmp_path / "mine").model == open_folder(folder).model
    assert as_files(files_of_folder(tmp_path / "mine")) == files(folder)
    assert links_outside(tmp_path / "mine") is None


def test_a_folder_of_links_to_shared_storage_is_read_and_said_to_be_one(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    as_links(folder, tmp_path / "storage", mine)
    found, truth = (dict(open_folder(each).read()) for each in (mine, folder))
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert as_files(files_of_folder(mine)) == files(folder)
    count = len([path for path in mine.iterdir() if path.is_symlink()])
    said = str(links_outside(mine))
    assert said.startswith(f"{mine}: {count} files are links to files elsewhere (")
    assert str(tmp_path / "storage") in said
    assert links_outside(folder) is None


def test_one_link_is_said_to_lead_to_one_file(tmp_path: Path) -> None:
    (tmp_path / "stored").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").symlink_to("../stored")
    assert str(links_outside(tmp_path / "mine")).startswith(
        f"{tmp_path / 'mine'}: 1 file is a link to a file elsewhere (config.json: "
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_link_in_a_folder_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    mine = shutil.copytree(folder, tmp_path / "mine")
    (mine / name).unlink()
    (mine / name).symlink_to("../gone")
    with pytest.raises(UserError, match=rf"{name} is a link to \.\./gone, which is not there"):
        open_folder(mine)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_no_file_in_a_folder_is_not_said_to_be_missing(
    folder: Path, tmp_path: Path, name: str
) -> None:
    mine = shutil.copytree(folder, tmp_path / "mine")
    (mine / name).unlink()
    os.mkfifo(mine / name)
    with pytest.raises(UserError, match=rf"{name} is not a regular file"):
        open_folder(mine)
    (mine / name).unlink()
    (mine / name).symlink_to(name)
    with pytest.raises(UserError, match=rf"{name} is a link to {name}, which leads back to it"):
        open_folder(mine)


def test_a_run_that_goes_on_needs_the_weights_of_the_folder_no_more(folder: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(folder, tmp_path / "mine")
    config = from_tables(
        tables(folder, model={"pretrained": str(mine)}, run={"folder": str(tmp_path / "run")})
    )
    (mine / "model.safetensors").unlink()
    (mine / "pytorch_model.bin").unlink()
    assert ["has no weights" in problem for problem in weights_problems(dict(config))] == [True]
    import_folder(folder, str(Path(checkpoint_folder(config)) / "step-0"))
    assert [*weights_problems(dict(config))] == []


def test_training_starts_from_the_weights_of_the_folder(folder: Path, tmp_path: Path) -> None:
    config = from_tables(tables(folder, run={"folder": str(tmp_path / "run")}))
    training = build(config, choose(config, 1), ALONE)
    start_from_pretrained(training, folder)
    theirs = load_file(folder / "model.safetensors")
    ours = dict(training.parallel.named_parameters())
    assert torch.equal(ours["embedding.weight"], theirs["model.embed_tokens.weight"].float())
    assert torch.equal(
        ours["blocks.1.attention.key.weight"], theirs["model.layers.1.self_attn.k_proj.weight"].float()
    )


def test_a_run_on_two_workers_keeps_what_the_folder_holds(folder: Path, tmp_path: Path, warm: Server) -> None:
    """With weights that no rank has whole, and from the second start on from its own checkpoint."""
    job = tmp_path / "job.toml"
    run = {"folder": str(tmp_path / "run")}
    job.write_text(
        to_toml(
            from_tables(tables(folder, run=run, layout={"tensor": 2}, train={"learning_rate": 1e-9})),
            as_asked=True,
        )
    )
    first = warm.run("train", str(job), "--workers", "2", cwd=tmp_path, environment={})
    assert first.returncode == 0, first.stderr
    assert f"starts from the weights in {folder}" in first.stderr
    again = warm.run("train", str(job), "train.steps=3", "--workers", "2", cwd=tmp_path, environment={})
    assert again.returncode == 0, again.stderr
    export_checkpoint(str(tmp_path / "run" / "checkpoints" / "step-3"), tmp_path / "out", dtype="bfloat16")
    assert files(tmp_path / "out") == files(folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    for name in before:  # such steps move nothing by more
        torch.testing.assert_close(after[name], before[name], rtol=1e-2, atol=1e-7)


def test_an_import_that_a_job_does_not_match_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, str(tmp_path / "step-0"))
    settings = from_tables(tables(folder)).model.settings()
    with pytest.raises(UserError, match=r"model\.norm_epsilon .*model\.pretrained=FOLDER"):
        check_same_model(
            "step-0", read_manifest(tmp_path / "step-0"), Model(**{**settings, "norm_epsilon": 1e-5})
        )


def test_kept_files_are_no_difference_between_a_run_and_an_import(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, str(tmp_path / "step-0"))
    export_checkpoint(str(tmp_path / "step-0"), tmp_path / "out")
    (tmp_path / "out" / "LICENSE").write_text("another")
    import_folder(tmp_path / "out", str(tmp_path / "step-1"))
    found = compare(Contents.open(tmp_path / "step-0"), Contents.open(tmp_path / "step-1"))
    assert [difference.tensor for difference in found.differences] == ["file.LICENSE"]


@pytest.mark.parametrize("name", ["../out.json", "/etc/passwd", ".hidden", "other/file", "model.safetensors"])
def test_a_checkpoint_cannot_write_files_elsewhere(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keeps a file"):
        as_files({file_key(name): torch.zeros(1, dtype=torch.uint8)})
