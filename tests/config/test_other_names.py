"""Keys that another program would have, or another section has, are answered with the key to write here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config import from_tables, read
from shardwise.config.other_names import OTHER_NAMES, job_key
from shardwise.config.schema import SPELLINGS, keys_of
from shardwise.errors import ConfigError

TEXT = {"source": "text.txt"}


def problems(tables: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": TEXT, **tables})
    return list(refusal.value.problems)


def test_every_name_of_another_program_leads_to_a_key_that_is_there() -> None:
    for name, ours in OTHER_NAMES.items():
        assert name == name.lower().replace("-", "_")
        assert ours.key or ours.note
        if ours.key:
            section, _, field = ours.key.partition(".")
            known = keys_of(section)
            assert field in known, ours.key
            assert name == field or name not in known, f"{section}.{name} is known, and means another thing"


def test_values_that_names_stand_for_are_values_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[data]\nsource = "text.txt"\n')
    for key, value, _ in OTHER_NAMES.values():
        if value and not value.isupper():  # capitals are to be replaced
            read(tmp_path / "job.toml", [f"{key}={value}"])


@pytest.mark.parametrize(
    ("section", "name", "ours"),
    [
        ("train", "lr", "train.learning_rate"),
        ("train", "optimizer", "optimizer.name"),
        ("train", "betas", "optimizer.betas"),
        ("train", "weight_decay", "optimizer.weight_decay"),
        ("optimizer", "lr", "train.learning_rate"),
        ("optimizer", "eps", "optimizer.epsilon"),
        ("train", "batch_size", "train.global_batch"),
        ("train", "compress", "layout.compression"),
        ("server", "compress", "server.compression"),
        ("local", "lr", "local.learning_rate"),
        ("train", "tp", "layout.tensor"),
        ("train", "tensor", "layout.tensor"),
        ("train", "sequence_lenght", "data.sequence_length"),
        ("train", "max-grad-norm", "train.clip"),
        ("model", "num_hidden_layers", "model.layers"),
        ("train", "stpes", "train.steps"),
        ("checkpoint", "interval", "checkpoint.every"),
    ],
)
def test_an_unknown_key_is_answered_with_ours_alone(section: str, name: str, ours: str) -> None:
    (problem,) = problems({section: {name: 1}})
    assert f"{section}.{name} = 1: unknown key. Did you mean {ours}?" in problem
    assert "known are" not in problem


@pytest.mark.parametrize("override", ["train.mode=async", "train.mode="])
def test_a_word_that_is_only_similar_to_a_short_name_is_answered_with_the_keys(
    tmp_path: Path, override: str
) -> None:
    (tmp_path / "job.toml").write_text('[data]\nsource = "text.txt"\n')
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path / "job.toml", [override])
    (problem,) = refusal.value.problems
    assert "unknown key; known are: " in problem
    assert "driver" in problem
    assert "model.preset" not in problem


def test_a_key_on_the_command_line_replaces_the_same_key_in_another_spelling(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[data]\nsource = "text.txt"\n[layout]\ndata = -1\n')
    assert read(tmp_path / "job.toml", ["layout.dp=2"]).layout.data == 2


def test_epochs_are_answered_with_how_many_steps_they_are() -> None:
    (problem,) = problems({"train": {"epochs": 3}})
    assert "The length of a run is train.steps: an epoch has" in problem


def test_a_key_of_another_program_outside_of_a_section_or_in_one_of_its_own_is_answered_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.toml").write_text(
        'lr = 3e-4\n[data]\nsource = "text.txt"\n[optimiser]\nweight_decay = 0.1\neps = 1e-8\n'
    )
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path / "job.toml")
    outside, section = refusal.value.problems
    assert outside == "lr = 0.0003: a key outside of a section. Did you mean train.learning_rate?"
    assert section.endswith(
        "optimiser.weight_decay is optimizer.weight_decay here; optimiser.eps is optimizer.epsilon here"
    )


def test_an_override_without_its_section_is_answered_with_the_whole_key(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[data]\nsource = "text.txt"\n')
    with pytest.raises(
        ConfigError,
        match=r"override 'lr=1e-3': write it as section\.key=value, here train\.learning_rate=1e-3",
    ):
        read(tmp_path / "job.toml", ["lr=1e-3"])


def test_spellings_that_a_job_may_use_are_no_mistakes() -> None:
    assert from_tables({"data": TEXT, "layout": {"tp": 1}}).layout.tensor == 1
    for spelling, field in SPELLINGS["layout"].items():
        meant = job_key(spelling)
        assert meant is not None
        assert meant.key == f"layout.{field}"


@pytest.mark.parametrize(
    ("section", "key", "value", "ours"),
    [
        ("train", "precision", "fp16", "float16"),
        ("layout", "compression", "bf16", "bfloat16"),
        ("layout", "weight_compression", "fp8", "float8"),
        ("server", "compression", "fp16", "float16"),
        ("local", "compression", "fp8", "float8"),
    ],
)
def test_a_dtype_by_another_name_is_answered_with_ours(section: str, key: str, value: str, ours: str) -> None:
    (problem,) = problems({section: {key: value}})
    assert problem.endswith(f". Write {section}.{key} = {ours!r}")


def test_a_dtype_that_the_key_does_not_take_is_not_advised() -> None:
    (problem,) = problems({"train": {"state_dtype": "fp16"}})
    assert "Write" not in problem
