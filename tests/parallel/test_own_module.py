"""A user's own module through the job file, in float64, against a plain torch loop on one device."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.jobs import ALONE, Trained, difference, job, start, train, weights
from ranks.pool import Pool
from torch import Tensor, nn

from shardwise.config import Config, Layout, from_tables
from shardwise.config.parameters import ModuleParameters
from shardwise.data import Dataset
from shardwise.drivers.replay import Pace, Replay
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.models import initial_value
from shardwise.optim import local
from shardwise.parallel import build_plain
from shardwise.plans import ModelSpec, Plan, StateBytes, choose
from shardwise.search.planner import Planner
from shardwise.train.build import build, restore, save
from shardwise.train.check_loss import check_summed_loss
from shardwise.train.check_module import check_module, count_parameters
from shardwise.train.evaluate import held_out_loss
from shardwise.train.steps import steps

HERE = Path(__file__).parent
EXAMPLE = f"{HERE.parents[1] / 'examples' / 'own_model.py'}:OwnModel"
SHAPE = {
    "layers": 4,
    "hidden": 24,
    "heads": 4,
    "head_dim": 6,
    "ffn": 50,
    "vocabulary": 259,
    "max_positions": 24,
}
STEPS, BATCH = 2, 4
SPLIT = ["nn.Linear", "nn.Conv1d", "nn.Embedding", "shardwise.models.Head"]
"""What a refusal lists as that which can be split."""
Tables = dict[str, dict[str, Any]]


def own(name: str) -> str:
    return f"{HERE / 'own_modules.py'}:{name}"


FROZEN = [
    (own("Headed"), {"tensor": 2}, False),
    (own("Headed"), {"data": 2, "zero": 3}, False),
    (own("Tuned"), {"tensor": 2, "data": 2, "zero": 3}, False),
    (own("Tuned"), {"data": 2, "zero": 0}, False),
    (own("Headed"), {"pipeline": 2, "data": 2, "zero": 1}, False),
    pytest.param(own("Headed"), {"pipeline": 2, "schedule": "zb1p"}, False, marks=pytest.mark.full),
    pytest.param(
        own("Tuned"), {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, False, marks=pytest.mark.full
    ),
    pytest.param(own("Tuned"), {"data": 2, "replica": 2, "zero": 2}, False, marks=pytest.mark.full),
    pytest.param(own("Headed"), {"data": 2, "zero": 2}, False, marks=pytest.mark.full),
]
"""Modules some of whose weights are frozen, and layouts."""


def tables_of(corpus: str, module: str, layout: dict[str, Any], reset: bool = False, **more: Any) -> Tables:
    return job(
        corpus,
        model={**SHAPE, "module": module},
        data={"reset_attention": reset},
        train={
            "steps": STEPS,
            "global_batch": BATCH,
            "micro_batch": 1,
            "schedule": "constant",
            "check_every": 1,
            **more,
        },
        layout={"data": 1, **layout},
    )


def plain_module(config: Config) -> nn.Module:
    """As its author would build and fill it, without us."""
    file, _, name = str(config.model.module).rpartition(":")
    spec = importlib.util.spec_from_file_location("plain", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    torch.manual_seed(config.train.seed)
    module: nn.Module = getattr(loaded, name)(config.model).double()
    if not hasattr(module, "initial_value"):
        return module
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            own = module.initial_value(path, shape, config.train.seed)
            parameter.copy_(initial_value(path, shape, None, config.train.seed) if own is None else own)
    return module


@cache
def plain_loop(text: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Whole logits, torch's AdamW, whole batches."""
    torch.set_num_threads(1)
    config = from_tables(json.loads(text))
    dataset, module = Dataset.open(config.data, config.train.seed), plain_module(config)
    looked_up = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    trained = [p for p in module.parameters() if p.requires_grad]
    plain = [p for p in trained if p.ndim < 2 or any(p is table for table in looked_up)]
    rest = [p for p in trained if all(p is not other for other in plain)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    numbers = []
    for step in range(STEPS):
        rows = dataset.sequences(step * BATCH, BATCH)
        documents = {} if rows.documents is None else {"documents": torch.from_numpy(rows.documents)}
        inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
        if hasattr(module, "count_items"):
            loss = module(inputs, targets, **documents) / module.count_items(inputs, targets)
        else:
            logits = module(inputs, None, **documents)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trained], foreach=False))
        for parameter in trained:
            parameter.grad *= min(1.0, 0.5 / norm)
        optimizer.step()
        numbers.append((loss.item(), norm))
    return numbers, {name: p.detach() for name, p in module.named_parameters()}


def worst(found: Trained, tables: Tables) -> float:
    numbers, truth = plain_loop(json.dumps({**tables, "layout": {}}))
    assert found.weights.keys() == truth.keys()
    pairs = zip(
        (*found.losses, *found.norms),
        (*(loss for loss, _ in numbers), *(norm for _, norm in numbers)),
        strict=True,
    )
    return max(
        *(abs(a - b) / abs(b) for a, b in pairs),
        *(difference(found.weights[name], truth[name]) for name in truth),
    )


@pytest.mark.parametrize(
    ("module", "layout", "reset"),
    [
        (EXAMPLE, {}, False),
        pytest.param(EXAMPLE, {"tensor": 2, "data": 2, "zero": 3}, False, marks=pytest.mark.full),
        pytest.param(EXAMPLE, {"pipeline": 2}, False, marks=pytest.mark.full),
        (EXAMPLE, {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, False),
        pytest.param(
            EXAMPLE, {"context": 2, "tensor": 2, "attention": "ring"}, False, marks=pytest.mark.full
        ),
        (EXAMPLE, {"data": 2, "zero": 0}, False),
        (own("Tied"), {}, True),
        pytest.param(own("Tied"), {"tensor": 2, "data": 2, "zero": 3}, True, marks=pytest.mark.full),
        (own("Tied"), {"pipeline": 2, "data": 2, "zero": 1}, True),
        pytest.param(
            own("Tied"),
            {"pipeline": 2, "tensor": 2, "schedule": "interleaved"},
            False,
            marks=pytest.mark.full,
        ),
        (own("NoTable"), {"data": 4, "zero": 3}, False),
        (own("NoTable"), {"data": 2, "replica": 2}, False),
        (own("Buffers"), {"data": 2, "zero": 3}, False),
        (own("Loading"), {"data": 2, "zero": 3}, False),
        (own("OnInstance"), {}, False),
        *FROZEN,
        (own("Convolved"), {"tensor": 2, "data": 2, "zero": 3}, False),
        (own("Classes"), {"data": 2, "zero": 2}, True),
        (own("Classes"), {"pipeline": 2, "tensor": 2}, True),
        pytest.param(own("Sequences"), {"data": 4, "zero": 1}, False, marks=pytest.mark.full),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else str(value),
)
def test_a_users_module_trains_as_in_a_plain_loop(
    ranks: Callable[[int], Pool], corpus: str, module: str, layout: dict[str, Any], reset: bool
) -> None:
    tables = tables_of(corpus, module, layout, reset)
    for found in ranks(Layout(**tables["layout"]).world).run(train, tables):
        assert worst(found, tables) < 1e-9


def saved(worker: Worker, tables: Tables) -> dict[str, Tensor]:
    training = start(worker, tables)
    list(steps(training))
    save(training)
    return weights(training)


def restored(worker: Worker, tables: Tables, folder: Path) -> dict[str, Tensor]:
    training = start(worker, tables)
    restore(training, folder)
    return weights(training)


@pytest.mark.parametrize(
    "layout",
    [{"pipeline": 2, "data": 2, "zero": 3}, pytest.param({"data": 4, "zero": 1}, marks=pytest.mark.full)],
    ids=str,
)
def test_a_users_module_goes_on_under_another_layout(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, layout: dict[str, int]
) -> None:
    tables = tables_of(corpus, own("Tied"), {"tensor": 2, "data": 2, "zero": 3})
    before = ranks(4).run(saved, {**tables, "run": {"folder": str(tmp_path)}})[0]
    for after in ranks(4).run(
        restored, {**tables, "layout": layout}, tmp_path / "checkpoints" / f"step-{STEPS}"
    ):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def evaluated(worker: Worker, tables: Tables) -> tuple[float | None, Tensor]:
    """The held-out loss, and the logits after a few tokens, before any training."""
    training = start(worker, tables)
    with torch.no_grad():
        logits = training.parallel.logits(torch.tensor([[5, 7, 11]], device=training.mesh.device))
    return held_out_loss(training), logits.cpu()


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_a_users_module_is_evaluated_and_sampled_from_alike(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]
) -> None:
    tables = tables_of(corpus, EXAMPLE, layout)
    module = plain_module(from_tables(tables))
    with torch.no_grad():
        truth = module(torch.tensor([[5, 7, 11]]), None)[0, -1]
    losses = []
    for loss, logits in ranks(2).run(evaluated, tables):
        assert difference(logits, truth) < 1e-9
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def evaluated_plainly(tables: Tables) -> float:
    """All held-out rows at once."""
    config = from_tables(tables)
    dataset, module = Dataset.open(config.data, config.train.seed), plain_module(config)
    rows = dataset.held_out_rows(0, min(dataset.held_out_count, config.train.evaluate_sequences))
    inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
    documents = {} if rows.documents is None else {"documents": torch.from_numpy(rows.documents)}
    with torch.no_grad():
        return float(module(inputs, targets, **documents) / module.count_items(inputs, targets))


def test_a_module_that_counts_its_own_items_is_evaluated_by_them(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    tables = tables_of(
        corpus, own("Classes"), {"data": 2}, reset=True, evaluate_sequences=7
    )  # no multiple of the devices
    truth = evaluated_plainly(tables)
    assert truth > 1, "of one class, not of one of many tokens"
    for loss, _ in ranks(2).run(evaluated, tables):
        assert loss == pytest.approx(truth, rel=1e-12)


def without_locks(tables: Tables) -> list[float]:
    training = start(ALONE, tables)
    return [step.loss for step in steps(training)]


def test_other_drivers_divide_by_the_same_items(corpus: str) -> None:
    tables = tables_of(corpus, own("Classes"), {}, reset=True, micro_batch=BATCH)
    truth = [loss for loss, _ in plain_loop(json.dumps({**tables, "layout": {}}))[0]]
    hogwild = {**tables, "train": {**tables["train"], "driver": "hogwild"}, "hogwild": {}}
    assert without_locks(hogwild) == pytest.approx(truth, rel=1e-12)
    server = {"servers": 1, "portions": 2, "max_staleness": 0}
    config = from_tables(
        {**tables, "train": {**tables["train"], "driver": "server", "micro_batch": None}, "server": server}
    )
    training = build(config, Planner(config, 2, None).first, ALONE)
    found = [step.loss for step in steps(training, source=Replay(training, [Pace()] * 2, seed=1))]
    assert found == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"tensor": 2, "zero": 3, "data": 2}, marks=pytest.mark.full),
        {"data": 2, "zero": 0},
        {"pipeline": 2},
    ],
    ids=str,
)
def test_bfloat16_differs_from_float64_by_rounding_alone(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]
) -> None:
    tables = tables_of(corpus, EXAMPLE, layout, precision="bfloat16")
    numbers, _ = plain_loop(json.dumps({**tables_of(corpus, EXAMPLE, {}), "layout": {}}))
    for found in ranks(Layout(**tables["layout"]).world).run(train, tables):
        assert found.losses == pytest.approx([loss for loss, _ in numbers], rel=2**-7)
        assert all(weight.dtype == torch.float32 for weight in found.weights.values())


TOO_LARGE = "one weight alone takes more than this machine's memory"


@pytest.mark.parametrize(
    ("module", "layout", "words"),
    [
        ("own_modules.py", {}, ["own_modules.py", "file.py:Class"]),
        ("nowhere.py:Model", {}, ["no such file", "nowhere.py"]),
        (f"{'x' * 300}.py:Model", {}, ["model.module = ", "cannot be read: File name too long"]),
        (own("Missing"), {}, ["no class or function Missing", "NoTable", "Tied"]),
        (own("Broken"), {}, ["could not be built", "TypeError", "own_modules.py, line", "meta"]),
        (own("TooLarge"), {}, [TOO_LARGE, "own_modules.py, line", "in parts"]),
        (own("Countless"), {}, [TOO_LARGE, "own_modules.py, line", "in parts"]),
        (own("number"), {}, ["returned int", "torch.nn.Module"]),
        (own("NoLoss"), {}, ["NoLoss.forward returned a tensor of shape (1, 24, 259)", 'reduction="sum"']),
        (own("Pair"), {}, ["Pair.forward returned tuple", "the loss", "count_items(inputs, targets)"]),
        (own("Unfilled"), {}, ["the buffer average has no values", "requires_grad=False"]),
        (own("Leaving"), {}, ["own_modules.py, line", "sys.exit(3) would end the run"]),
        (own("AllFrozen"), {}, ["AllFrozen has no parameters to train", "requires_grad=False"]),
        (own("CountsEach"), {}, ["CountsEach.count_items returned a tensor of shape (1,)", "one number"]),
        (own("CountsAlone"), {}, ["CountsAlone.count_items", "(inputs, targets)"]),
        (own("CountsNothingSound"), {}, ["CountsNothingSound.count_items returned nan"]),
        (own("Whole"), {}, ["the parameter order is of torch.int64", "make it a buffer"]),
        (own("Stateful"), {}, ["get_extra_state gives what no checkpoint holds"]),
        (own("Averaged"), {"data": 2}, ["norm is BatchNorm1d", "nn.LayerNorm"]),
        (own("NotATable"), {}, ["NotATable.sharding is tuple", "shardwise.models.Sharding"]),
        (
            own("NoTable"),
            {"tensor": 2},
            ["layout.tensor = 2", "NoTable has no sharding table", "docs/sharding.md"],
        ),
        (own("NoTable"), {"pipeline": 2}, ["layout.pipeline = 2", "NoTable has no sharding table"]),
        (own("NoTable"), {"context": 2}, ["layout.context = 2", "NoTable has no sharding table"]),
        (own("MissingEntry"), {"tensor": 2}, ["no entry for scores", "weight, bias", '"scores": whole()']),
        (own("MisspeltEntry"), {}, ["names 'score'", "no module"]),
        (own("WrongRole"), {"tensor": 2}, ["scores: the role vocabulary() does not fit Linear", *SPLIT]),
        (
            own("Grouped"),
            {"tensor": 2},
            ["depth: the role columns() does not fit Conv1d: it has groups=24", *SPLIT],
        ),
        (
            own("Attending"),
            {"tensor": 2},
            ["attention: the role whole() does not fit MultiheadAttention", *SPLIT],
        ),
        (own("Looked"), {"tensor": 2}, ["table: the role columns() does not fit Embedding", *SPLIT]),
        (own("Homeless"), {"pipeline": 2}, ["spare.weight", "no stage would own it"]),
        (own("UntoldTie"), {"pipeline": 2}, ["head.weight", "tied={'head.weight': 'body.words.weight'}"]),
        (own("ThreeLayers"), {"pipeline": 2}, ["body.layers has 3 modules", "model.layers = 4"]),
        (own("Tied"), {"context": 2}, ["layout.context = 2", "`mixing`"]),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else "",
)
def test_what_a_module_lacks_is_named(
    corpus: str, module: str, layout: dict[str, Any], words: list[str]
) -> None:
    config = from_tables(tables_of(corpus, module, layout))
    with pytest.raises(UserError) as error:
        check_module(config, choose(config, config.layout.world).layout)
    for word in words:
        assert word in str(error.value)


def test_all_that_is_wrong_with_a_module_is_said_at_once(corpus: str) -> None:
    config = from_tables(tables_of(corpus, own("MisspeltEntry"), {"tensor": 2}, recompute="full"))
    with pytest.raises(UserError, match="MisspeltEntry' has 3 problems:") as error:
        check_module(config, config.layout)
    for words in ("train.recompute = 'full'", "names 'score', which is no module", "no entry for scores"):
        assert words in str(error.value)


def test_too_few_logits_are_refused_in_words(corpus: str) -> None:
    training = start(ALONE, tables_of(corpus, own("OneAnswer"), {}))
    with pytest.raises(
        UserError, match=r"OneAnswer.forward returned logits of 1 position of a longer sequence"
    ):
        training.parallel.logits(torch.tensor([[5, 7, 11]]))


def refusal(worker: Worker, tables: Tables) -> str:
    with pytest.raises(UserError) as error:
        check_summed_loss(start(worker, tables))
    return str(error.value)


@pytest.mark.parametrize(
    ("module", "layout", "says"),
    [
        ("MeanOfTokens", {}, "MeanOfTokens.forward returns a mean"),
        ("MeanOfTokens", {"pipeline": 2, "data": 2, "zero": 1}, "MeanOfTokens.forward returns a mean"),
        ("MeanOfTokens", {"tensor": 2}, "MeanOfTokens.forward returns a mean"),
        ("MeanOfRows", {"data": 2, "zero": 3}, "MeanOfRows.forward returns a mean"),
        ("MeanOfEachRow", {}, "MeanOfEachRow.forward returns a mean over each sequence"),
        ("MeanOfEachRow", {"tensor": 2}, "MeanOfEachRow.forward returns a mean over each sequence"),
        ("MeanOfEachRow", {"pipeline": 2}, "MeanOfEachRow.forward returns a mean over each sequence"),
        ("MeanOfTargets", {"data": 2, "zero": 3}, "MeanOfTargets.forward returns a mean over each sequence"),
        (
            "NoTargets",
            {"data": 2, "zero": 0},
            "NoTargets.forward returns nan for a sequence whose targets are all -100",
        ),
    ],
    ids=str,
)
def test_a_loss_that_is_not_a_sum_is_refused_before_the_first_step_on_any_layout(
    ranks: Callable[[int], Pool], corpus: str, module: str, layout: dict[str, Any], says: str
) -> None:
    tables = tables_of(corpus, own(module), layout, evaluate_sequences=7)
    for message in ranks(Layout(**tables["layout"]).world).run(refusal, tables):
        assert says in message
        assert 'reduction="sum"' in message


def test_a_mean_of_each_row_is_refused_where_devices_share_a_sequence(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    (tmp_path / "mean.py").write_text(f"""
import sys
sys.path.append({str(HERE.parents[1] / "examples")!r})
from own_model import OwnModel

class MeanOfParts(OwnModel):
    def forward(self, inputs, targets=None, positions=None):
        result = super().forward(inputs, targets, positions)
        return result if targets is None else result / targets.shape[1]
""")
    tables = tables_of(corpus, f"{tmp_path / 'mean.py'}:MeanOfParts", {"context": 2})
    for message in ranks(2).run(refusal, tables):
        assert "MeanOfParts.forward returns a mean over each sequence" in message


def test_rows_without_a_target_are_not_asked_about_where_evaluation_has_none(corpus: str) -> None:
    check_summed_loss(start(ALONE, tables_of(corpus, own("NoTargets"), {}, evaluate_sequences=8)))


@pytest.mark.parametrize("module", ["OneLength", "OtherMark", "Sequences", "Classes", "Noting", "Turning"])
def test_a_right_loss_is_not_refused(corpus: str, module: str) -> None:
    check_summed_loss(start(ALONE, tables_of(corpus, own(module), {}, evaluate_sequences=8)))


def accepted(worker: Worker, tables: Tables) -> None:
    check_summed_loss(start(worker, tables))


def test_a_right_loss_is_not_refused_where_devices_share_a_sequence(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    ranks(2).run(accepted, tables_of(corpus, EXAMPLE, {"context": 2}, reset=False))


def checked_first(worker: Worker, tables: Tables) -> tuple[bool, Trained]:
    """Whether nothing that is saved, drawn or counted changes by the check, and the training after it."""
    training = start(worker, tables)

    def present() -> list[Tensor]:
        held = [*training.parallel.named_parameters(), *training.parallel.named_buffers()]
        return [torch.get_rng_state(), *(local(tensor.detach()).clone() for _, tensor in held)]

    before = present()
    check_summed_loss(training)
    same = (
        all(torch.equal(*pair) for pair in zip(before, present(), strict=True))
        and not training.comm.ledger.take()
    )
    return same, Trained(list(steps(training)), weights(training))


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("Noting", {}),
        ("Noting", {"data": 2, "zero": 3}),
        ("Tied", {"pipeline": 2, "data": 2, "zero": 1}),
        ("Classes", {"tensor": 2}),
        ("Convolved", {"data": 2, "zero": 0}),
    ],
    ids=str,
)
def test_the_check_of_a_summed_loss_leaves_no_trace(
    ranks: Callable[[int], Pool], corpus: str, module: str, layout: dict[str, Any]
) -> None:
    pool, tables = ranks(Layout(**{"data": 1, **layout}).world), tables_of(corpus, own(module), layout)
    for (same, found), unchecked in zip(
        pool.run(checked_first, tables), pool.run(train, tables), strict=True
    ):
        assert same
        assert (found.losses, found.norms) == (unchecked.losses, unchecked.norms)
        assert [step.collectives for step in found.steps] == [step.collectives for step in unchecked.steps]
        assert all(torch.equal(found.weights[name], unchecked.weights[name]) for name in unchecked.weights)


@pytest.mark.filterwarnings("error:Casting complex")
def test_complex_buffers_are_saved_and_come_back(corpus: str, tmp_path: Path) -> None:
    tables = {**tables_of(corpus, own("Turning"), {}), "run": {"folder": str(tmp_path)}}
    saved(ALONE, tables)
    training = start(ALONE, tables)
    turns = training.parallel.model.turns
    turns.zero_()
    restore(training, tmp_path / "checkpoints" / f"step-{STEPS}")
    assert torch.equal(turns, torch.polar(torch.ones(24), torch.arange(24) / 7))


def test_documents_and_blocks_are_asked_for_only_where_needed(corpus: str) -> None:
    for changes, word in (
        ({"reset": True}, "documents"),
        ({"recompute": "full"}, "blocks"),
        ({"compile": True}, "blocks"),
    ):
        config = from_tables(tables_of(corpus, own("NoTable"), {}, **changes))
        with pytest.raises(UserError, match=word):
            check_module(config, config.layout)
    check_module(from_tables(tables_of(corpus, own("NoTable"), {})), Layout(data=1))


def test_the_plan_of_a_users_module_counts_its_own_parameters(corpus: str) -> None:
    config = from_tables(tables_of(corpus, own("NoTable"), {}))
    parameters = 259 * 24 + 24 * 259 + 259
    assert count_parameters(config) == ModuleParameters(parameters)
    plan = choose(config, 1, None, ModuleParameters(parameters))
    assert (plan.parameters, plan.flops_per_token) == (parameters, 6 * parameters)
    assert plan.state_bytes.total == 32 * parameters, "float64 weights, gradients and two moments"
    assert plan.to_json()["flop_convention"].startswith("6 per parameter")


def test_the_plan_of_a_module_with_frozen_weights_has_gradients_and_moments_of_the_others_alone(
    corpus: str,
) -> None:
    config = from_tables(tables_of(corpus, own("Headed"), {}))
    counted = count_parameters(config)
    assert counted is not None
    assert counted.trained == 24 * 259 + 259
    plan = choose(config, 1, None, counted)
    assert plan.state_bytes == StateBytes(
        weights=8 * counted.total, gradients=8 * counted.trained, optimizer=16 * counted.trained
    )
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_what_a_constructor_draws_is_the_same_in_every_process(corpus: str) -> None:
    config = from_tables(tables_of(corpus, own("Buffers"), {}))
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), dict(build_plain(ModelSpec.of(config)).named_buffers())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = dict(build_plain(ModelSpec.of(config)).named_buffers())
    assert torch.equal(first["drawn"], again["drawn"])
    assert first["exact"].dtype == torch.float64
    alone = start(ALONE, tables_of(corpus, own("Buffers"), {}, precision="float32")).parallel.model
    expected = {**first, "drawn": dict(plain_module(config).named_buffers())["drawn"]}
    for name, buffer in alone.named_buffers(remove_duplicate=False):
        assert torch.equal(buffer.double(), expected["made" if name == "again" else name].double()), name
    assert alone.again is alone.made
    other = build_plain(ModelSpec.of(from_tables(tables_of(corpus, own("Buffers"), {}, seed=6))))
    assert not torch.equal(first["drawn"], dict(other.named_buffers())["drawn"])
