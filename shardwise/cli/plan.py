"""`shardwise plan JOB --schedule`: what the job's pipeline will do and when, drawn and counted before anything runs.

Text and numbers go to standard output, or with `--json` one object; `--svg FILE` writes a drawing. The schedule is the very
value that `shardwise train` would run, so what is drawn is what happens. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.plan.timeline import Timeline


def plan(
    job: Annotated[Path, typer.Argument(help="The job: a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as section.key=value.")] = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="Draw the pipeline's schedule, with its bubble.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the drawing to this file as SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """What a job will do, without doing it: for now its pipeline schedule, with bubble, activations and stages."""
    from shardwise.config import read
    from shardwise.errors import UserError

    if not schedule:
        advice = f"`shardwise plan {job} --schedule` draws the pipeline schedule of the layout given"
        raise UserError(f"plan: this version does not search for a layout yet; {advice}")
    pipeline = _pipeline(read(job, overrides or []))
    if svg is not None:
        _write_svg(svg, pipeline.timeline)
    if json:
        from json import dumps

        print(dumps(_as_json(pipeline)))
    else:
        print(_as_text(pipeline))


@dataclass(frozen=True)
class _Pipeline:
    timeline: Timeline
    """With every stage alike: F = I = W = 1."""
    by_cost: Timeline
    """With the stages as they are cut."""
    blocks: tuple[int, ...]
    """Transformer blocks of each stage."""


def _pipeline(config: Config) -> _Pipeline:
    from shardwise.plan import block_costs, make_schedule, simulate, stage_blocks, stage_costs

    layout, length = config.layout, config.data.sequence_length
    schedule = make_schedule(layout.schedule, layout.pipeline, _micro_batches(config), layout.stages_per_rank)
    blocks = stage_blocks(config.model, length, schedule.stages, layout.stages)
    thirds = [cost / 3 for cost in stage_costs(blocks, *block_costs(config.model, length))]
    return _Pipeline(simulate(schedule), simulate(schedule, thirds, thirds, thirds), blocks)


def _micro_batches(config: Config) -> int:
    """Micro-batches of one pipeline; an open data axis counts as one."""
    from shardwise.plan import micro_batch_size

    layout = config.layout if config.layout.data > 0 else config.layout.model_copy(update={"data": 1})
    return config.train.global_batch // layout.data_parallel // micro_batch_size(config.train, layout)


def _write_svg(path: Path, timeline: Timeline) -> None:
    from shardwise.errors import UserError
    from shardwise.plan.draw_schedule import draw_svg

    try:
        path.write_text(draw_svg(timeline), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path}: cannot be written ({error.strerror}); give another path") from None
    typer.echo(f"drawn in {path}", err=True)


def _as_json(pipeline: _Pipeline) -> dict[str, Any]:
    from shardwise.plan import peak_in_flight

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
    from shardwise.plan import peak_in_flight
    from shardwise.plan.draw_schedule import draw_text, summary

    schedule = pipeline.timeline.schedule
    rows = [f"{'rank':<6}{'activations':<13}{'idle':<8}stages"]
    peaks = peak_in_flight(schedule)
    for rank in range(schedule.ranks):
        stages = ", ".join(f"{stage} ({_count(pipeline.blocks[stage])})" for stage in schedule.stages_of(rank))
        rows.append(f"{rank:<6}{peaks[rank]:<13}{pipeline.timeline.idle[rank]:<8.1%}{stages}")
    by_cost = f"with the embedding and the head counted, the bubble is {pipeline.by_cost.bubble:.1%}"
    return "\n".join([summary(pipeline.timeline), "", draw_text(pipeline.timeline), "", *rows, "", by_cost])


def _count(blocks: int) -> str:
    return f"{blocks} block" if blocks == 1 else f"{blocks} blocks"
