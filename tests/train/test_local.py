"""Groups that train by themselves and meet now and then, against plain torch: two loops, and SGD on what they
moved by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, Tables, job, put_together, start
from ranks.pool import Pool
from torch import Tensor

from shardwise.codecs import parse_row_codec
from shardwise.config import from_tables
from shardwise.drivers.local import LocalRank
from shardwise.errors import ConfigError
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.proof.plain_torch import Rows, train_plainly
from shardwise.train.build import Training, build, restore, save
from shardwise.train.evaluate import held_out_loss
from shardwise.train.steps import StepRecord, steps

GROUPS, STEPS = 2, 11
Weights = dict[str, Tensor]


def local_job(
    corpus: str, family: str = "llama", layout: dict[str, Any] | None = None, **local: Any
) -> Tables:
    train = {"steps": STEPS, "driver": "local", "global_batch": 8}
    tables = job(corpus, model=FAMILIES[family], train=train, layout={"data": 1, **(layout or {})})
    return {**tables, "local": {"groups": GROUPS, "sync_every": 4, **local}}


def start_groups(worker: Worker, tables: Tables) -> Training:
    config = from_tables(tables)
    groups = config.local.groups
    part = config.model_copy(
        update={
            "train": config.train.model_copy(update={"global_batch": config.train.global_batch // groups})
        }
    )
    plan = replace(choose(part, worker.world // groups), groups=groups)
    return build(config, plan, worker)


def anchors(training: Training) -> Weights:
    assert isinstance(training.rank_driver, LocalRank)
    return put_together(training.rank_driver.outer.anchors, training.mesh.worker.world)


def train_groups(worker: Worker, tables: Tables) -> tuple[list[StepRecord], Weights, float | None]:
    training = start_groups(worker, tables)
    done = list(steps(training))
    return done, anchors(training), held_out_loss(training)


def plainly(corpus: str, tables: Tables) -> tuple[list[float], Weights]:
    """Losses of the first group, and the anchor at the end."""
    synchronous = {
        **tables,
        "train": {**tables["train"], "driver": "synchronous"},
        "layout": {"data": 1},
        "local": {},
    }
    training = start(ALONE, synchronous)
    config, settings = training.config, from_tables(tables).local
    first = {name: parameter.detach().clone() for name, parameter in training.parallel.named_parameters()}
    share = config.train.global_batch // GROUPS
    groups = [{name: weight.clone() for name, weight in first.items()} for _ in range(GROUPS)]

    def rows_of(group: int) -> Callable[[int], Rows]:
        def rows(step: int) -> Rows:
            found = training.dataset.sequences((step - 1) * config.train.global_batch + group * share, share)
            inputs, targets = (torch.from_numpy(part).long() for part in (found.inputs, found.targets))
            return inputs, targets, torch.zeros_like(inputs)

        return rows

    loops = [
        train_plainly(config, weights, {}, rows_of(group), STEPS) for group, weights in enumerate(groups)
    ]
    anchor = {name: torch.nn.Parameter(weight.clone()) for name, weight in first.items()}
    outer = torch.optim.SGD(
        anchor.values(), settings.learning_rate, momentum=settings.momentum, nesterov=settings.momentum > 0
    )
    losses, under_way = [], dict[str, list[Tensor]]()

    @torch.no_grad()
    def land(under_way: dict[str, list[Tensor]]) -> None:
        outer.zero_grad()
        for name, brought in under_way.items():
            anchor[name].grad = torch.stack([anchor[name] - weight for weight in brought]).mean(0)
        outer.step()
        for name, brought in under_way.items():
            for weights, weight in zip(groups, brought, strict=True):
                weights[name].add_(anchor[name] - weight)
        under_way.clear()

    cut = fragments(first, settings.fragments)
    every = settings.sync_every // settings.fragments
    for step, done in enumerate(zip(*loops, strict=True), start=1):
        losses.append(done[0].loss)
        if under_way and (step == STEPS or step % every == settings.overlap):
            land(under_way)
        names = (
            list(first)
            if step == STEPS
            else cut[step // every % settings.fragments - 1]
            if step % every == 0
            else []
        )
        under_way |= {name: [weights[name].clone() for weights in groups] for name in names}
        if names and (step == STEPS or not settings.overlap):
            land(under_way)
    return losses, {name: weight.detach() for name, weight in anchor.items()}


def fragments(weights: Weights, count: int) -> list[list[str]]:
    total, before, cut = (
        sum(weight.numel() for weight in weights.values()),
        0,
        [list[str]() for _ in range(count)],
    )
    for name, weight in weights.items():
        cut[min(count - 1, (before + weight.numel() // 2) * count // total)].append(name)
        before += weight.numel()
    return cut


@pytest.mark.parametrize(
    ("layout", "local"),
    [
        ({}, {}),
        ({}, {"fragments": 2, "overlap": 1}),
        pytest.param({}, {"learning_rate": 1.0, "momentum": 0.0}, marks=pytest.mark.full),
        pytest.param({}, {"fragments": 2}, marks=pytest.mark.full),
        pytest.param({}, {"overlap": 3}, marks=pytest.mark.full),
        ({"data": 2, "zero": 3}, {"overlap": 1}),
        pytest.param({"tensor": 2}, {"fragments": 2}, marks=pytest.mark.full),
        pytest.param({"data": 2, "zero": 0}, {"overlap": 1}, marks=pytest.mark.full),
        pytest.param({"data": 2, "zero": 0}, {}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2}, {}, marks=pytest.mark.full),
        pytest.param({"context": 2}, {}, marks=pytest.mark.full),
        pytest.param({"tensor": 2, "data": 2, "zero": 2}, {"overlap": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_groups_come_to_what_plain_loops_come_to(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any], local: dict[str, Any]
) -> None:
    tables = local_job(corpus, layout=layout, **local)
    losses, anchor = plainly(corpus, tables)
    world = GROUPS * from_tables(tables).layout.world
    done, found, held_out = ranks(world).run(train_groups, tables)[0]
    assert [step.loss for step in done] == pytest.approx(losses, rel=1e-9)
    for name, weight in anchor.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12, msg=name)
    assert held_out is not None


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 0}], ids=str)
def test_groups_exchange_nothing_between_meetings(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]
) -> None:
    """And then every number once, whichever device of a group sends it."""
    tables = local_job(corpus, layout=layout)
    devices = from_tables(tables).layout.world
    done, anchor, _ = ranks(GROUPS * devices).run(train_groups, tables)[0]
    numbers = -(-sum(weight.numel() for weight in anchor.values()) // devices)
    met = {
        step.step: step.collectives
        for step in done
        if any(key.endswith("/group") for key in step.collectives)
    }
    assert list(met) == [4, 8, 11]
    for sent in met.values():
        assert sent["all_reduce/group"]["bytes"] == 8, "a vote"
        for kind in ("all_to_all", "all_gather"):
            assert 8 * numbers <= sent[f"{kind}/group"]["bytes"] <= 8 * (numbers + 1), (
                "differences, and their sums"
            )


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(codec, marks=pytest.mark.full) for codec in ("bfloat16", "int4"))]
)
def test_what_is_sent_in_few_bits_is_near_what_was_meant(
    ranks: Callable[[int], Pool], corpus: str, codec: str
) -> None:
    """One meeting, whose outer step is the mean itself: each number is off by half a level of its block at
    most."""
    tables = local_job(corpus, sync_every=STEPS, learning_rate=1.0, momentum=0.0)
    coded = {**tables, "local": {**tables["local"], "compression": codec}}
    (_, exact, _), (done, found, _) = (
        ranks(2).run(train_groups, tables)[0],
        ranks(2).run(train_groups, coded)[0],
    )
    first = {
        name: value.detach()
        for name, value in start(ALONE, job(corpus, model=FAMILIES["llama"])).parallel.named_parameters()
    }
    moved = max(float((exact[name] - first[name]).abs().max()) for name in exact)
    level = {"bfloat16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}[codec]
    error = max(float((exact[name] - found[name]).abs().max()) for name in exact)
    assert 0 < error <= 2 * level * moved, "groups move by about as much"
    sizes = [weight.numel() for weight in exact.values()]
    wire = sum(map(parse_row_codec(codec).wire_bytes, sizes))
    assert done[-1].collectives["all_gather/group"] == {
        "count": 1,
        "bytes": 2 * wire,
        "plain": 2 * 8 * sum(sizes),
    }


@pytest.mark.parametrize(
    ("family", "layout", "local"),
    [
        pytest.param("llama", {"tensor": 2}, {"compression": "int8", "fragments": 2}, marks=pytest.mark.full),
        ("tied", {"pipeline": 2}, {"compression": "int4", "fragments": 2, "overlap": 1}),
        pytest.param("tied", {"tensor": 2}, {"groups": 4}, marks=pytest.mark.full),
        pytest.param("experts", {"data": 2, "expert": 2, "zero": 2}, {"overlap": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_copies_of_a_weight_stay_equal_in_a_group(
    ranks: Callable[[int], Pool], corpus: str, family: str, layout: dict[str, Any], local: dict[str, Any]
) -> None:
    """Norms on the devices of a tensor axis, and the two ends of a tied weight, lie at other places of what
    is exchanged; the guard compares their bits after every step."""
    tables = local_job(corpus, family, layout, **local)
    tables["train"]["check_every"] = 1
    config = from_tables(tables)
    done, _, _ = ranks(config.local.groups * config.layout.world).run(train_groups, tables)[0]
    assert len(done) == STEPS


def test_a_run_that_ended_can_be_prolonged(ranks: Callable[[int], Pool], corpus: str, tmp_path: Path) -> None:
    """At its end nothing is under way, where there would be if it went on."""
    tables = {**local_job(corpus, sync_every=11, overlap=3), "run": {"folder": str(tmp_path)}}
    saved, anchor = ranks(2).run(save_after, tables, STEPS)[0]
    longer = {**tables, "train": {**tables["train"], "steps": STEPS + 4}}
    loaded, _, count = ranks(2).run(continue_from, longer, saved)[0]
    assert all(torch.equal(loaded[name], anchor[name]) for name in anchor)
    assert count == 4


def save_after(worker: Worker, tables: Tables, step: int) -> tuple[str, Weights]:
    """Where the checkpoint is, and the anchor."""
    training = start_groups(worker, tables)
    next(done for done in steps(training) if done.step == step)
    return save(training), anchors(training)


def continue_from(worker: Worker, tables: Tables, folder: str) -> tuple[Weights, Weights, int]:
    """The model as it is loaded, the model at the end, and the steps between."""
    training = start_groups(worker, tables) if tables["train"]["driver"] == "local" else start(worker, tables)
    restore(training, folder)
    grouped = isinstance(training.rank_driver, LocalRank)
    model = training.rank_driver.outer.anchors if grouped else dict(training.parallel.named_parameters())
    loaded, count = put_together(model, worker.world), len(list(steps(training)))
    return loaded, put_together(model, worker.world), count


@pytest.mark.parametrize(
    ("layout", "local", "stop"),
    [
        pytest.param({}, {}, 4, marks=pytest.mark.full),
        pytest.param({}, {}, 6, marks=pytest.mark.full),
        pytest.param({"data": 2, "zero": 0}, {"overlap": 2}, 5, marks=pytest.mark.full),
        ({}, {"fragments": 2, "overlap": 1, "compression": "int8"}, 6),
        pytest.param({"data": 2, "zero": 3}, {"overlap": 2}, 5, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_run_of_groups_goes_on_to_the_last_bit(
    ranks: Callable[[int], Pool],
    corpus: str,
    tmp_path: Path,
    layout: dict[str, Any],
    local: dict[str, Any],
    stop: int,
) -> None:
    """Between meetings, and with an exchange under way."""
    tables = {**local_job(corpus, layout=layout, **local), "run": {"folder": str(tmp_path)}}
    pool = ranks(GROUPS * from_tables(tables).layout.world)
    whole = pool.run(train_groups, tables)[0][1]
    saved, _ = pool.run(save_after, tables, stop)[0]
    _, halved, _ = pool.run(continue_from, tables, saved)[0]
    assert all(torch.equal(whole[name], halved[name]) for name in whole)


def test_the_anchor_goes_on_with_other_groups_and_without(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = {**local_job(corpus), "run": {"folder": str(tmp_path)}}
    saved, anchor = ranks(2).run(save_after, tables, 6)[0]
    four = {**tables, "local": {**tables["local"], "groups": 4}}
    together = {
        **tables,
        "train": {**tables["train"], "driver": "synchronous"},
        "layout": {"data": 2},
        "local": {},
    }
    for world, other in (
        (4, four),
        (2, together),
        (1, {**tables, "local": {**tables["local"], "groups": 1}}),
    ):
        found = (
            ranks(world).run(continue_from, other, saved)[0]
            if world > 1
            else continue_from(ALONE, other, saved)
        )
        loaded, _, count = found
        assert all(torch.equal(loaded[name], anchor[name]) for name in anchor)
        assert count == STEPS - 6


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"groups": 3}, "local.groups = 3: does not divide train.global_batch = 8"),
        ({"fragments": 3}, "local.fragments = 3: does not divide local.sync_every = 4"),
        ({"overlap": 4}, "local.overlap = 4: an exchange has to be over before the next begins"),
        ({"compression": "topk(0.1)"}, "local.compression"),
    ],
)
def test_what_cannot_work_is_refused(corpus: str, local: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tables(local_job(corpus, **local))


FLOAT8 = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocabulary": 259}


def float8_job(corpus: str, **local: Any) -> Tables:
    tables = local_job(corpus, **local)
    return {**tables, "model": FLOAT8, "train": {**tables["train"], "steps": 5, "precision": "float8"}}


def train_outgrowing(
    worker: Worker, tables: Tables, after: int | None
) -> tuple[list[StepRecord], list[int], Weights]:
    """After that step the second group takes a scale that is too large: of a gradient on which no other
    scaled tensor depends. The step made again has seen one more maximum of each, so its scales may lose a few
    of the smallest numbers more."""
    training = start_groups(worker, tables)
    assert isinstance(training.rank_driver, LocalRank)
    outer = training.rank_driver.outer
    met, done, original = [], [], outer.after

    def meet(step: int) -> None:
        met.append(step)
        original(step)

    outer.after = meet  # type: ignore[method-assign]
    for step in steps(training):
        done.append(step)
        if step.step == after and training.mesh.coordinate("group") == 1:
            scale = training.parallel.parts[0].model.get_submodule("blocks.0.attention.query.float8.gradient")
            scale.get_buffer("value").mul_(2.0**12)
    return done, met, anchors(training)


@pytest.mark.parametrize("local", [{"sync_every": 2}, {"sync_every": 4, "overlap": 1}], ids=str)
def test_a_group_whose_step_in_float8_is_made_again_meets_the_others_once(
    ranks: Callable[[int], Pool], corpus: str, local: dict[str, Any]
) -> None:
    tables = float8_job(corpus, **local)
    (_, undisturbed), (_, disturbed) = (
        ranks(GROUPS).run(train_outgrowing, tables, after) for after in (None, 3)
    )
    usual, done = undisturbed[0], disturbed[0]
    assert [step.again - before.again for step, before in zip(done, usual, strict=True)] == [0, 0, 0, 1, 0]
    assert disturbed[1] == undisturbed[1] == sorted(set(disturbed[1]))
    assert [step.loss for step in done] == pytest.approx([step.loss for step in usual], rel=1e-6)
    for name, anchor in undisturbed[2].items():
        torch.testing.assert_close(disturbed[2][name], anchor, rtol=1e-5, atol=1e-6, msg=name)


def test_the_first_look_in_float8_is_no_step_to_meet_after(ranks: Callable[[int], Pool], corpus: str) -> None:
    for _, met, _ in ranks(GROUPS).run(train_outgrowing, float8_job(corpus, sync_every=1), None):
        assert met == [1, 2, 3, 4, 5]


def train_looking(worker: Worker, tables: Tables, looks: bool) -> list[float]:
    training, losses = start_groups(worker, tables), []
    for step in steps(training):
        losses.append(step.loss)
        if looks:
            held_out_loss(training)
    return losses


def test_in_float8_a_look_at_the_anchor_leaves_a_group_the_scales_of_its_own_weights(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    tables = float8_job(corpus, sync_every=5)
    first, second = (ranks(GROUPS).run(train_looking, tables, looks) for looks in (False, True))
    assert first == second
