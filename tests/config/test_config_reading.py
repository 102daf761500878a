"""Reading a job: TOML, overrides, presets, peers' spellings, and the way back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import (
    PRESETS,
    Config,
    Layout,
    Model,
    context_attention,
    divisors,
    from_tables,
    read,
    read_with_origins,
    to_toml,
)
from shardwise.config.module_file import problems_of_module
from shardwise.errors import ConfigError

TEXT = {"source": "text.txt"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nsource = "text.txt"\n[train]\nsteps = 7\n')
    return path


def test_overrides_replace_values_of_every_kind(job: Path) -> None:
    overrides = ["train.steps=9", "train.learning_rate=1e-2", "train.clip=false",
                 "optimizer.betas=[0.8, 0.9]", "train.compile=true",
                 "data.tokenizer=folder/my tokenizer.json", "train.recompute=0.5",
                 "observe.wandb=project"]  # fmt: skip
    config = read(job, overrides)
    assert (config.train.steps, config.train.learning_rate, config.train.clip) == (9, 1e-2, None)
    assert (config.optimizer.betas, config.train.compile, config.train.recompute) == ((0.8, 0.9), True, 0.5)
    assert (config.data.tokenizer, config.observe.wandb) == ("folder/my tokenizer.json", "project")


def test_a_preset_fills_the_model_and_given_fields_win() -> None:
    model = from_tables({"model": {"preset": "llama3-8b", "layers": 3}, "data": TEXT}).model
    assert (model.layers, model.hidden, model.kv_heads, model.vocabulary) == (3, 4096, 8, 128256)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_valid_model(preset: str) -> None:
    assert (
        from_tables({"model": {"preset": preset}, "data": TEXT}).model.heads % PRESETS[preset]["kv_heads"]
        == 0
    )


def test_peers_spellings_of_the_axes_are_understood() -> None:
    layout = from_tables(
        {"layout": {"dp_shard": 4, "dp_replicate": 2, "tp": 1, "pp": 1}, "data": TEXT}
    ).layout
    assert (layout.data, layout.replica, layout.data_parallel) == (4, 2, 8)


def test_layout_auto_means_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('layout = "auto"\n[data]\nsource = "text.txt"\n')
    assert read(tmp_path / "job.toml").layout.data == -1


def test_layout_auto_lossy_leaves_compression_to_the_planner_too(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('layout = "auto+lossy"\n[data]\nsource = "text.txt"\n')
    (tmp_path / "table.toml").write_text('[data]\nsource = "text.txt"\n[layout]\ntensor = 2\n')
    assert read(tmp_path / "job.toml").layout.model_dump(exclude_unset=True) == {"compression": "auto"}
    warm = read(tmp_path / "job.toml", ["layout.compression_warmup=20"]).layout
    assert (warm.compression, warm.compression_warmup) == ("auto", 20)
    given = read(tmp_path / "table.toml", ["layout=auto+lossy"]).layout
    assert given.model_dump(exclude_unset=True) == {"compression": "auto"}
    (tmp_path / "job.toml").write_text('layout = "lossy"\n[data]\nsource = "text.txt"\n')
    with pytest.raises(ConfigError, match=r"auto\+lossy"):
        read(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"train": {"steps": True}}, "train.steps = True"),
        ({"train": {"precision": "half"}}, "'float32', 'bfloat16', 'float16', 'float8' or 'float64'"),
        ({"train": {"recompute": 1.5}}, "between 0 (recompute all) and 1"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "below 1"),
        ({"train": {"state_dtype": "bfloat16"}}, "needs train.precision = 'bfloat16'"),
        (
            {"train": {"precision": "float64", "state_dtype": "float32"}},
            "float64 precision keeps float64 states",
        ),
        ({"data": {"source": "a", "sources": [{"path": "b"}]}}, "both given"),
        ({"data": {"sources": [{"path": "b", "weight": -1}]}}, "weight"),
        ({"layout": {"offload": True, "zero": 0}}, "layout.offload"),
        ({"layout": {"data": 0}}, "layout.data = 0"),
        ({"layout": {"zero": 4}}, "layout.zero = 4"),
        ({"model": {"head_dim": 33}}, "even head_dim"),
        ({"run": {"foldr": "x"}}, "Did you mean run.folder?"),
    ],
)
def test_a_rule_broken_is_a_problem_named(tables: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError, match="problem") as error:
        from_tables({"data": TEXT, **tables})
    assert words in str(error.value)


def test_problems_of_one_section_do_not_hide_those_of_another() -> None:
    with pytest.raises(ConfigError) as error:
        from_tables(
            {"model": {"heads": 6, "kv_heads": 4}, "train": {"steps": 0, "stepz": 1}, "layout": {"zero": 9}}
        )
    assert len(error.value.problems) == 5  # heads, steps, stepz, zero, and no data


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-12, 10, allow_nan=False),
    clip=st.one_of(st.just(False), st.floats(1e-3, 1e3)),
    prompt=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
)
def test_a_config_survives_being_written_and_read(
    steps: int, rate: float, clip: float | bool, prompt: str, weights: list[float]
) -> None:
    sources = [{"path": f"folder {index}/*.txt", "weight": weight} for index, weight in enumerate(weights)]
    tables = {
        "train": {"steps": steps, "learning_rate": rate, "clip": clip},
        "observe": {"sample": prompt},
        "data": {"sources": sources},
    }
    config = from_tables(tables)
    assert from_tables(tomllib.loads(to_toml(config))) == config


UNSET = """
[model]
preset = "bytes-400k"
layers = 3
[data]
source = "text.txt"
[train]
steps = 7
micro_batch = 2
[layout]
tp = 2
"""


@pytest.mark.parametrize(
    ("overrides", "section", "expected"),
    [
        (["train.steps="], "train", {"steps": 100, "micro_batch": 2}),  # a key with a default
        (["train.micro_batch="], "train", {"steps": 7, "micro_batch": None}),  # an optional key
        (
            ["model.layers="],
            "model",
            {"layers": 2, "hidden": 128, "preset": "bytes-400k"},
        ),  # filled in by the preset
        (["model.preset=", "model.hidden=64"], "model", {"layers": 3, "hidden": 64, "preset": None}),
        (["layout.tensor="], "layout", {"tensor": 1}),  # whatever it is called in the job
        (["layout.tp="], "layout", {"tensor": 1}),
        (["layout="], "layout", {"tensor": 1}),  # a whole table
        (["train="], "train", {"steps": 100, "micro_batch": None}),
        (["cluster=", "cluster.preset="], "cluster", {"preset": None}),  # nothing to leave out
        (["train.steps=", "train.steps=9"], "train", {"steps": 9}),  # the last one counts
        (["train.steps=9", "train.steps="], "train", {"steps": 100}),
        (["observe.sample=''"], "observe", {"sample": ""}),  # an empty text has quotes
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_override_with_nothing_after_its_sign_leaves_a_key_out(
    tmp_path: Path, overrides: list[str], section: str, expected: dict[str, object]
) -> None:
    (tmp_path / "job.toml").write_text(UNSET)
    values = getattr(read(tmp_path / "job.toml", overrides), section).model_dump()
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.source=", "data.source: missing"),  # a required key
        ("data=", "data.source: missing"),
        ("train.stpes=", "train.stpes: unknown key. Did you mean train.steps?"),
        ("trian=", "[trian]: unknown section. Did you mean train?"),
        ("trian.steps=", "[trian]: unknown section. Did you mean train?"),
        ("model.preset=none", "write model.preset= with nothing after it to leave it out"),
        ("train.micro_batch=none", "write train.micro_batch= with nothing after it to leave it out"),
    ],
)
def test_what_cannot_be_left_out_or_is_not_left_out_so_is_answered(
    tmp_path: Path, override: str, words: str
) -> None:
    (tmp_path / "job.toml").write_text(UNSET)
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path / "job.toml", [override])
    (problem,) = refusal.value.problems
    assert words in problem


def test_the_origin_of_a_key_that_was_left_out_is_what_left_it_out_or_filled_it_in(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(UNSET)
    _, origins = read_with_origins(tmp_path / "job.toml", ["train.steps=", "model.layers=", "run.folder="])
    assert origins["train.steps"] == "override train.steps="
    assert (origins["model.layers"], origins["run.folder"]) == ("preset bytes-400k", "the job's name")


@pytest.mark.parametrize(
    ("tables", "problems"),
    [
        ({"server": {"max_staleness": -3}, "train": {"driver": "server"}, "layout": {"pipeline": 2}},
         ["server.max_staleness = -3: input should be greater than or equal to 0, or 'unbounded'",
          "train.driver = 'server': each of layout.data workers has a whole model; leave "
          "layout.pipeline out"]),
        ({"train": {"recompute": 1.5, "clip": 0}, "optimizer": {"betas": 0.9}},
         ["train.clip = 0: input should be greater than 0",
          "optimizer.betas = 0.9: input should be a list in brackets, such as [0.9, 0.95]",
          "train.recompute = 1.5: a memory budget lies between 0 (recompute all) and 1 (keep all)"]),
        ({"train": {"float8_leave_out": "head"}},
         ["train.float8_leave_out = 'head': input should be a list in brackets, such as ['blocks.0.*', "
          "'*.attention.*']"]),
        ({"train": {"recompute": "some"}},
         ["train.recompute = 'some': input should be 'none', 'selective', 'all-but-attention' or 'full', or "
          "a valid number"]),
        ({"model": {"hidden": 0, "heads": 4, "kv_heads": 3}, "train": {"steps": 0, "global_batch": 8},
        "layout": {"data": 3}},
         ["model.hidden = 0: input should be greater than or equal to 1",
          "train.steps = 0: input should be greater than or equal to 1",
          "model.kv_heads = 3: does not divide model.heads = 4; use one of 1, 2, 4",
          "train.global_batch = 8: does not divide over 3 data-parallel devices (replica 1 x data 3); use "
          "6 or 9"]),
        # nothing is said of what depends on a wrong value
        ({"train": {"driver": "servers"}, "server": {"servers": 2}},
         ["train.driver = 'servers': input should be 'synchronous', 'by-speed', 'server', 'local' or "
          "'hogwild'"]),
        # left out, it would be 1.0
        ({"train": {"clip": "none"}}, ["train.clip = 'none': input should be a valid number"]),
        ({"data": {"sources": [{"path": "a", "wieght": 2.0}]}},
         ["data.sources.0.wieght = 2.0: unknown key. Did you mean weight?"]),
        ({"layout": {"tensor": 0}, "model": {"heads": 3, "kv_heads": 3}},
         ["layout.tensor = 0: input should be greater than or equal to 1"]),
        ({"train": {"shares": "by speed"}},
         ["train.shares = 'by speed': unknown key. Did you mean train.driver = by-speed? (or synchronous: "
          "even shares)"]),
        ({"train": {"driver": "local"}, "local": {"steps": 5}},
         ["local.steps = 5: unknown key. Did you mean local.sync_every?"]),
        ({"train": {"driver": "local"}, "layout": {"compression": "int8"}},
         ["train.driver = 'local': leave layout.compression out; what groups exchange is local.compression"]),
    ],
)  # fmt: skip
def test_a_wrong_value_hides_no_other_problem_and_is_named_once(
    tables: dict[str, dict[str, object]], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": TEXT, **tables})
    assert list(refusal.value.problems) == problems


def test_configs_are_values_that_do_not_change() -> None:
    config: Config = from_tables({"data": TEXT})
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


@given(st.integers(1, 500))
def test_divisors_are_those_numbers_that_divide(number: int) -> None:
    assert divisors(number) == [value for value in range(1, number + 1) if number // value * value == number]


def test_a_window_over_a_ring_is_refused_with_what_works() -> None:
    tables = {
        "model": {"window": 16, "heads": 4, "kv_heads": 1},
        "data": {"source": "text", "sequence_length": 64},
        "layout": {"context": 2, "data": 1, "attention": "ring"},
    }
    with pytest.raises(
        ConfigError, match=r"cannot keep to model\.window = 16; use layout\.attention = 'ulysses'"
    ) as refusal:
        from_tables(tables)
    assert "the nearest layout that works: layout.attention=auto" in str(refusal.value)
    assert (
        context_attention(from_tables({**tables, "layout": {"context": 2}}).model, Layout(context=2))
        == "ulysses"
    )
    from_tables(
        {**tables, "data": {"source": "text", "sequence_length": 16}}
    )  # where the window cuts nothing
    with pytest.raises(ConfigError, match="as many context devices as divide the 3 heads"):
        from_tables({**tables, "model": {"window": 16, "heads": 3, "kv_heads": 3}, "layout": {"context": 2}})


CLASS = "class Mine(nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        (f"from torch import nn\n{CLASS}", True),
        (f"import torch.nn as nn\n{CLASS}", True),
        ("import torch\nclass Mine(torch.nn.Module):\n    pass\n", True),
        (f"from torch import nn\n{CLASS}    sharding = None\n", False),
        (f"from torch import nn\n{CLASS}    def __init__(self):\n        self.sharding = 1\n", False),
        (f"from torch import nn\n{CLASS}setattr(Mine, 'sharding', 1)\n", False),
        ("from elsewhere import Base\nclass Mine(Base):\n    pass\n", False),
        (f"from torch import nn\nfrom elsewhere import with_table\n@with_table\n{CLASS}", False),
        ("from torch import nn\ndef Mine(config):\n    return nn.Linear(2, 2)\n", False),
    ],
)
def test_a_module_is_said_to_have_no_table_only_where_its_text_leaves_no_doubt(
    tmp_path: Path, text: str, sure: bool
) -> None:
    (tmp_path / "own.py").write_text(text)
    model = Model(module=f"{tmp_path / 'own.py'}:Mine")
    assert [*problems_of_module(model, Layout(data=2, zero=3))] == []
    found = [*problems_of_module(model, Layout(data=1, tensor=2, pipeline=2))]
    assert [problem.partition(":")[0] for problem in found] == (
        ["layout.pipeline = 2", "layout.tensor = 2"] if sure else []
    )
