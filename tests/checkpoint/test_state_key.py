"""Keys of a checkpoint's tensors. Names of weights are the user's to choose: none is taken for something
else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks.jobs import ALONE, job, start, weights
from torch import Tensor

from shardwise.checkpoint.save import _expected
from shardwise.checkpoint.state_key import GradientSlice, StateKey, StateKind, split_scale_name
from shardwise.checkpoint.tensor_files import Contents, StoredTensor, write_checkpoint
from shardwise.config import Layout
from shardwise.errors import UserError
from shardwise.train.build import restore, save
from shardwise.train.inference import load_checkpoint
from shardwise.train.steps import steps

LAYOUT = Layout(data=1)  # type: ignore[call-arg]
WEIGHTS = [
    "inner_optimizer.weight", "optimizer.weight", "a.optimizer.b", "model.model.weight", "residual.weight",
    "residual.data.x@0:2/0of2", "factor.x", "group.0.weight", "file.txt.weight", "a.float8.b",
    "float8.input.weight", "random.0.cpu", "outer.momentum.x", "outer.own.x",
]  # fmt: skip
MODEL, OPTIMIZER, RANDOM = StateKind.MODEL, StateKind.OPTIMIZER, StateKind.RANDOM
SLICE = GradientSlice("data", ((0, 257), (0, 16)), 1, 2)
OLD = {
    "model.embedding.weight": StateKey(MODEL, "embedding.weight"),
    "model.inner_optimizer.weight": StateKey(MODEL, "inner_optimizer.weight"),
    "model.file.txt.weight": StateKey(MODEL, "file.txt.weight"),
    "model.residual.weight": StateKey(MODEL, "residual.weight"),
    "model.group.0.weight": StateKey(MODEL, "group.0.weight"),
    "model.model.model.weight": StateKey(MODEL, "model.model.weight"),
    "model.optimizer.weight": StateKey(MODEL, "optimizer.weight"),
    "model.blocks.0.feed_forward.router.bias": StateKey(MODEL, "blocks.0.feed_forward.router.bias"),
    "model.head.float8.input.maxima": StateKey(MODEL, "head.float8.input.maxima"),
    "optimizer.inner_optimizer.weight.exp_avg": StateKey(OPTIMIZER, "inner_optimizer.weight", "exp_avg"),
    "optimizer.group.0.weight.step": StateKey(OPTIMIZER, "group.0.weight", "step"),
    "optimizer.optimizer.weight.exp_avg_sq": StateKey(OPTIMIZER, "optimizer.weight", "exp_avg_sq"),
    "group.1.model.group.0.weight": StateKey(MODEL, "group.0.weight", group=1),
    "group.0.model.head.float8.gradient.maxima": StateKey(MODEL, "head.float8.gradient.maxima", group=0),
    "group.12.optimizer.model.model.weight.step": StateKey(OPTIMIZER, "model.model.weight", "step", 12),
    "group.0.outer.own.group.0.weight": StateKey(StateKind.OUTER_OWN, "group.0.weight", group=0),
    "outer.mean.residual.weight": StateKey(StateKind.OUTER_MEAN, "residual.weight"),
    "outer.momentum.file.txt.weight": StateKey(StateKind.OUTER_MOMENTUM, "file.txt.weight"),
    "residual.data.head.weight@0:257,0:16/1of2": StateKey(StateKind.RESIDUAL, "head.weight", part=SLICE),
    "residual.replicaxdata.group.0.weight@8:16/0of4": StateKey(
        StateKind.RESIDUAL, "group.0.weight", part=GradientSlice("replicaxdata", ((8, 16),), 0, 4)
    ),
    "factor.data.residual.weight@0:257,0:16/1": StateKey(
        StateKind.FACTOR, "residual.weight", part=GradientSlice("data", ((0, 257), (0, 16)), 1)
    ),
    "random.0.cpu": StateKey(RANDOM, "0", "cpu"),
    "random.11.cuda": StateKey(RANDOM, "11", "cuda"),
    "file.tokenizer.json": StateKey(StateKind.FILE, "tokenizer.json"),
    "file.additional_chat_templates/tool_use.jinja": StateKey(
        StateKind.FILE, "additional_chat_templates/tool_use.jinja"
    ),
}
"""Names as checkpoints have them that were written before there were keys."""


@pytest.mark.parametrize("text", OLD)
def test_a_name_in_an_old_checkpoint_is_read_as_what_it_is_and_written_as_it_was(text: str) -> None:
    assert StateKey.parse(text) == OLD[text]
    assert str(OLD[text]) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "weight", "models.x", "optimizer.x", "optimizer.x.", "group.0.x", "group.00.model.x",
        "group.0.file.x", "group.0.group.1.model.x", "group.x.model.x", "random.cpu", "residual.weight",
        "residual.data.w@0:2/1", "residual.data.w@0:2,/0of2", "residual.data.w@1:23:4/0of2",
        "factor.data.w@0:2/0of2", "outer.x", f"group.{'9' * 5000}.model.x",
    ],
)  # fmt: skip
def test_a_name_of_no_known_form_is_kept_as_it_is(text: str) -> None:
    assert StateKey.parse(text) == StateKey(StateKind.OTHER, text)
    assert str(StateKey.parse(text)) == text


FIRST = [kind.value for kind in StateKind] + ["group.1.", "group.0.model.", "group.2.optimizer."]


@given(st.sampled_from(FIRST), st.text("ab.@:/,01of", max_size=12) | st.text(max_size=6))
def test_every_text_is_written_as_it_was_read(first: str, rest: str) -> None:
    assert str(StateKey.parse(first + rest)) == first + rest


@pytest.mark.parametrize("name", WEIGHTS)
def test_whatever_a_weight_is_called_its_key_and_those_of_its_moments_come_back(name: str) -> None:
    for key in (StateKey.model(name), StateKey.optimizer(name, "exp_avg")):
        assert StateKey.parse(str(key)) == key
        assert StateKey.parse(str(key.of_group(3))) == key.of_group(3)
        assert not key.is_float8_history
    assert StateKey.model(name).is_model
    assert not StateKey.model(name).of_group(3).is_model


def test_the_name_of_a_scale_says_which_module_multiplies() -> None:
    assert split_scale_name("head.float8.input") == ("head", "input")
    assert split_scale_name("blocks.0.experts.float8.gate_up.weight") == (
        "blocks.0.experts",
        "gate_up.weight",
    )


def checkpoint(keys: list[StateKey]) -> Contents:
    tensors = {key: StoredTensor("float32", (2,), ()) for key in keys}
    return Contents("run/step-1", cast(Any, SimpleNamespace(layout=LAYOUT.model_dump(mode="json"))), tensors)


def of(group: int | None, key: StateKey) -> StateKey:
    return key if group is None else key.of_group(group)


@pytest.mark.parametrize("group", [None, 1])
@pytest.mark.parametrize("absent", WEIGHTS)
def test_a_weight_that_a_checkpoint_lacks_is_asked_for_whatever_its_name(
    absent: str, group: int | None
) -> None:
    """The reader then refuses the checkpoint by that name; a weight is never left at zero in silence."""
    keys = [of(group, StateKey.model(name)) for name in WEIGHTS]
    state = {key: torch.ones(2) for key in keys}
    expected = _expected(state, checkpoint([key for key in keys if key.name != absent]), LAYOUT)
    assert list(expected) == keys
    assert all(value.tolist() == [1.0, 1.0] for value in state.values())


@pytest.mark.parametrize("group", [None, 1])
def test_moments_and_maxima_that_a_checkpoint_lacks_begin_at_zero(group: int | None) -> None:
    kept = [of(group, StateKey.model(name)) for name in WEIGHTS]
    moments = [of(group, StateKey.optimizer(name, "exp_avg")) for name in WEIGHTS]
    histories = ("blocks.0.query.float8.input.maxima", "blocks.0.experts.float8.gate_up.gradient.maxima")
    maxima = [of(group, StateKey.model(name)) for name in histories]
    assert all(key.is_float8_history for key in maxima)
    state = {key: torch.ones(2) for key in [*kept, *moments, *maxima]}
    expected = _expected(state, checkpoint([*kept, moments[0], maxima[0]]), LAYOUT)
    assert list(expected) == [*kept, moments[0]]
    assert all(state[key].tolist() == [0.0, 0.0] for key in [*moments[1:], *maxima])


ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.inner_optimizer = nn.Linear(width, width)
        self.optimizer = nn.Linear(width, width)
        self.residual = nn.Linear(width, width)
        self.group = nn.ModuleList([nn.Linear(width, width)])
        self.model, self.file = nn.Module(), nn.Module()
        self.model.model = nn.Linear(width, width)
        self.file.txt = nn.Linear(width, width)
        self.head = nn.Linear(width, config.vocabulary)

    def forward(self, inputs, targets=None):
        x, inner = self.embedding(inputs), (self.inner_optimizer, self.optimizer, self.residual)
        for layer in (*inner, self.group[0], self.model.model, self.file.txt):
            x = x + layer(x).tanh()
        logits = self.head(x)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
"""
NAMES = ("inner_optimizer", "optimizer", "residual", "group.0", "model.model", "file.txt")


@pytest.fixture
def tables(corpus: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "odd.py").write_text(ODD)
    model = {"module": f"{tmp_path / 'odd.py'}:Odd", "hidden": 8, "vocabulary": 259}
    train = {"steps": 4, "precision": "float32"}
    return job(corpus, model=model, train=train, run={"folder": str(tmp_path / "run")})


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_module_whose_weights_are_called_like_other_state_is_saved_resumed_and_read(
    tables: dict[str, Any],
) -> None:
    training, saved = start(ALONE, tables), {}
    for step in steps(training):
        if step.step == 2:
            folder, saved = save(training), weights(training)
    assert {f"{name}.weight" for name in NAMES} <= saved.keys()
    resumed = start(ALONE, tables)
    restore(resumed, folder)
    assert equal(weights(resumed), saved)
    list(steps(resumed))
    assert equal(weights(resumed), weights(training))
    assert load_checkpoint(folder).model.module == tables["model"]["module"]


def test_a_checkpoint_that_lacks_such_a_weight_is_refused_by_its_name(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    training = start(ALONE, tables)
    whole = Contents.open(save(training))
    for name in NAMES:
        absent, folder = StateKey.model(f"{name}.weight"), tmp_path / name / "step-1"
        rest = ((key, whole.read(key)) for key in whole.tensors if key != absent)
        write_checkpoint(folder, whole.manifest, rest)
        with pytest.raises(UserError, match=str(absent)):
            restore(training, str(folder))
        with pytest.raises(UserError, match=f"lacks {name}.weight"):
            load_checkpoint(str(folder))
