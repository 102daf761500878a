"""`shardwise plan JOB`: find the best layout for a job before anything runs, and say why it is the best. The
answer is text, JSON or an HTML page.

It needs no torch if the job names its cluster. `--schedule` draws the pipeline schedule of the given layout:
exactly the one that `shardwise train` would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.arguments import AsJson, JobFile
from shardwise.library.plan_job import cluster_of, plan_answer, problems_of_cluster

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.cli.plan_goals import Answer
    from shardwise.config import Config
    from shardwise.cost.cluster import Cluster
    from shardwise.files import Json
    from shardwise.plans.timeline import Timeline


def plan(
    job: JobFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, as section.key=value; section.key= leaves a key out. A layout key fixes it."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the answer as one page to this file.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every candidate, not each layout in its best form.")
    ] = False,
    scale: Annotated[
        str | None, typer.Option("--scale", help="Scaling curves over these device counts: 8,16,32.")
    ] = None,
    fewest: Annotated[
        bool, typer.Option("--fewest", help="The fewest devices on which it fits; with --days, in time.")
    ] = False,
    maximise: Annotated[
        str | None, typer.Option("--maximise", help="`sequence` or `batch`: the most that fits.")
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option("--compute-budget", help="FLOPs: the compute-optimal model and tokens for them."),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            "--days", help="The compute-optimal model for this many days here; with --fewest, a deadline."
        ),
    ] = None,
    storage_speed: Annotated[
        float,
        typer.Option(
            "--storage-gb-per-s",
            help="Speed in GB/s at which all nodes together write checkpoints to their storage.",
        ),
    ] = 20.0,
    device_mtbf: Annotated[
        float | None,
        typer.Option(
            "--device-mtbf-hours",
            help="Mean hours between two failures of one device; left out: as published for Llama 3.",
        ),
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline's schedule, with its bubble.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the drawing to this file as SVG.")] = None,
    json: AsJson = False,
) -> None:
    """Find the best layout for a job: what it costs, why it wins, and where the next best loses."""
    from shardwise.config import read
    from shardwise.library.check_job import float8_problems
    from shardwise.search.search import check_countable

    questions = _Questions(scale, fewest, maximise, flops, days)
    numbers = {
        "--compute-budget": flops,
        "--days": days,
        "--storage-gb-per-s": storage_speed,
        "--device-mtbf-hours": device_mtbf,
    }
    config = read(
        job,
        overrides or [],
        checks=[
            lambda _: _problems_of_questions(questions, html, schedule),
            lambda _: _problems_of_numbers(numbers),
            lambda _: _unwritable({"--html": html, "--svg": svg}),
            problems_of_cluster,
            float8_problems,
        ],
    )
    if schedule or svg is not None:
        _draw(config, svg, json)
        return
    check_countable(config)
    cluster = cluster_of(config)
    if questions.anything:
        _print(*_goal(config, cluster, questions), json)
        return
    answer = plan_answer(config, cluster, str(job), everything, storage_speed, device_mtbf)
    if html is not None:
        from shardwise.library.plan_page import render_page

        html.write_text(render_page(answer), encoding="utf-8")
        typer.echo(f"written to {html}", err=True)
    if json:
        from json import dumps

        print(dumps(answer))
    elif html is None:
        _show(answer)


@dataclass(frozen=True)
class _Questions:
    """The options that ask for something other than the best layout."""

    scale: str | None
    fewest: bool
    maximise: str | None
    flops: float | None
    days: float | None

    @property
    def anything(self) -> bool:
        """Whether any question was asked beside the best layout."""
        return bool(self.options) or self.flops is not None or self.days is not None

    @property
    def options(self) -> list[str]:
        """Options that ask a question, except budgets."""
        given = {
            "--scale": self.scale is not None,
            "--fewest": self.fewest,
            "--maximise": self.maximise is not None,
        }
        return [option for option, is_given in given.items() if is_given]


def _problems_of_questions(questions: _Questions, html: Path | None, schedule: bool) -> Iterator[str]:
    from shardwise.cli import plan_goals

    if html is not None and (questions.anything or schedule):
        yield "--html: shows the best layout; leave the other questions out, or ask them without it"
    yield from _problems_together(questions)
    if questions.scale is not None:
        yield from plan_goals.problems_of_counts(questions.scale)
    if questions.maximise is not None and questions.maximise not in plan_goals.LARGEST:
        yield f"--maximise {questions.maximise}: give {' or '.join(plan_goals.LARGEST)}"


def _problems_together(questions: _Questions) -> Iterator[str]:
    """Yield a problem if questions were asked that do not go together."""
    options, flops, days = questions.options, questions.flops, questions.days
    budget = flops is not None or (days is not None and not questions.fewest)
    if len(options) > 1 or (options and budget):
        yield f"{' and '.join(options)}: one question at a time; --days goes with --fewest or alone"
    elif flops is not None and days is not None:
        yield "give --compute-budget or --days, not both"


def _problems_of_numbers(numbers: Mapping[str, float | None]) -> Iterator[str]:
    examples = {"--compute-budget": ", for example 1e22", "--days": ", for example 30"}
    for option, value in numbers.items():
        if value is not None and not (value > 0 and isfinite(value)):
            yield f"{option} {value:g}: give a number above 0{examples.get(option, '')}"


def _goal(config: Config, cluster: Cluster, questions: _Questions) -> Answer:
    """Return the answer to the question that was asked beside the best layout."""
    from shardwise.cli import plan_goals

    if questions.scale is not None:
        return plan_goals.scale(config, cluster, questions.scale)
    if questions.fewest:
        return plan_goals.fewest(config, cluster, questions.days)
    if questions.maximise is not None:
        return plan_goals.maximise(config, cluster, questions.maximise)
    return plan_goals.budget(config, cluster, questions.flops, questions.days)


def _print(answer: Json, shown: Sequence[RenderableType], json: bool) -> None:
    if json:
        from json import dumps

        print(dumps(answer))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for part in shown:
        console.print(part, soft_wrap=isinstance(part, str))


def _show(answer: Json) -> None:
    from rich.console import Console

    from shardwise.library.plan_show import show

    show(answer, Console(highlight=False, markup=False))


def _unwritable(files: Mapping[str, Path | None]) -> Iterator[str]:
    """Yield the files that cannot be written, before the search and not after it."""
    for option, path in files.items():
        try:
            if path is None or path == Path("/dev/stdout"):
                continue
            if path.is_dir():
                yield f"{option} {path}: is a folder; give the path of a file"
                continue
            with path.open("a"):
                pass
            if path.is_file() and path.stat().st_size == 0:
                path.unlink()  # no empty file is left if there is no answer
        except OSError as error:
            yield f"{option} {path}: cannot be written ({error.strerror}); give another path"


def _draw(config: Config, svg: Path | None, json: bool) -> None:
    pipeline = _pipeline(config)
    if svg is not None:
        _write_svg(svg, pipeline.timeline)
    if json:
        from json import dumps

        print(dumps(_as_json(pipeline)))
    else:
        print(_as_text(pipeline))


@dataclass(frozen=True)
class _Pipeline:
    """The schedule of a job's pipeline, played with equal and with actual costs of the stages."""

    timeline: Timeline
    """Timeline with equal stages: F = I = W = 1."""
    by_cost: Timeline
    """Timeline with the costs of the actual stages."""
    blocks: tuple[int, ...]
    """Number of transformer blocks in each stage."""


def _pipeline(config: Config) -> _Pipeline:
    from shardwise.plans import block_costs, make_schedule, simulate, stage_blocks, stage_costs

    layout, length = config.layout, config.data.sequence_length
    schedule = make_schedule(layout.schedule, layout.pipeline, _micro_batches(config), layout.stages_per_rank)
    blocks = stage_blocks(config.model, length, schedule.stages, layout.stages)
    thirds = [cost / 3 for cost in stage_costs(blocks, *block_costs(config.model, length))]
    return _Pipeline(simulate(schedule), simulate(schedule, thirds, thirds, thirds), blocks)


def _micro_batches(config: Config) -> int:
    """Return the number of micro-batches of one pipeline.

    An open data axis takes the devices of the cluster that the other axes leave; if the job names no cluster,
    it counts as one.
    """
    from shardwise.cost.clusters import requested_cluster
    from shardwise.plans import choose, micro_batch_size

    layout, cluster = config.layout, requested_cluster(config.cluster)
    devices = cluster.devices if cluster is not None else config.cluster.devices
    if layout.data < 0 and devices is not None:
        return choose(config, devices).accumulation
    layout = layout if layout.data > 0 else layout.model_copy(update={"data": 1})
    return config.train.global_batch // layout.data_parallel // micro_batch_size(config.train, layout)


def _write_svg(path: Path, timeline: Timeline) -> None:
    from shardwise.library.draw_schedule import draw_svg

    path.write_text(draw_svg(timeline), encoding="utf-8")
    typer.echo(f"drawn in {path}", err=True)


def _as_json(pipeline: _Pipeline) -> Json:
    from shardwise.plans import peak_in_flight

    timeline, schedule = pipeline.timeline, pipeline.timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "micro_batches": schedule.micro_batches,
        "stages": list(pipeline.blocks),
        "rank_of_stage": list(schedule.rank_of_stage),
        "bubble": timeline.bubble,
        "bubble_by_cost": pipeline.by_cost.bubble,
        "idle": list(timeline.idle),
        "peak_activations": list(peak_in_flight(schedule)),
        "actions": [[str(action) for action in row] for row in schedule.actions],
    }


def _as_text(pipeline: _Pipeline) -> str:
    from shardwise.library.draw_schedule import draw_text, summary
    from shardwise.plans import peak_in_flight
    from shardwise.plurals import counted

    schedule = pipeline.timeline.schedule
    rows = [f"{'rank':<6}{'activations':<13}{'idle':<8}stages"]
    peaks = peak_in_flight(schedule)
    for rank in range(schedule.ranks):
        stages = ", ".join(
            f"{stage} ({counted(pipeline.blocks[stage], 'block')})" for stage in schedule.stages_of(rank)
        )
        rows.append(f"{rank:<6}{peaks[rank]:<13}{pipeline.timeline.idle[rank]:<8.1%}{stages}")
    by_cost = f"with the embedding and the head counted, the bubble is {pipeline.by_cost.bubble:.1%}"
    return "\n".join([summary(pipeline.timeline), "", draw_text(pipeline.timeline), "", *rows, "", by_cost])
