"""Show the planner's answer in a terminal: the best layout to paste, bars of memory and time, the next best
layout, and what limits the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.observe.format import format_count, format_energy, format_figure, format_span
from shardwise.plurals import counted
from shardwise.search.reasons import describe_term, format_seconds
from shardwise.search.slow_links import PLAIN

Answer = Mapping[str, Any]
"""The object that `shardwise plan --json` prints, or an object in it."""
WIDTH = 60
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_black", "white")
_SMALL = 0.005


def show(answer: Answer, console: Console) -> None:
    """Print the planner's whole answer."""
    best = answer["best"]
    _headline(answer, console)
    console.print()
    console.print(Text(best["config"].rstrip(), style="bold"), soft_wrap=True)
    console.print()
    _bar("memory", best["memory_gib"], best["memory_limit_gib"], "GiB of {:.4g} a plan may use", console)
    _bar("step", best["step_seconds"], best["step_seconds"]["total"], "s", console)
    console.print()
    if answer["runner_up"]:
        second = answer["runner_up"]
        console.print(f"next best of another kind: {second['kind']}")
        console.print(Padding(f"loses on {second['loses_on']}", (0, 0, 0, 2)))
    for sentence in [*answer["binding"], *answer.get("advice", ())]:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", sentence)
        console.print(grid)
    console.print()
    _rejected(answer, console)


def _headline(answer: Answer, console: Console) -> None:
    best, cluster = answer["best"], answer["cluster"]
    nodes = f"{cluster['nodes']} x {cluster['devices_per_node']}"
    size = f"{cluster['devices']:,} x {cluster['device']} ({nodes})"
    parameters, tokens = format_count(answer["model"]["parameters"]), answer["tokens_per_step"]
    console.print(f"{parameters} parameters on {size}, {tokens:,} tokens a step")
    mfu = "" if best["mfu"] is None else f", MFU {best['mfu']:.1%}"
    speed = f"{best['tokens_per_second_per_device']:,.0f} tokens/s a device{mfu}"
    console.print(Text(best["kind"], style="bold green"), soft_wrap=True)
    micro = f"micro-batch {best['micro_batch']}, {best['accumulation']} a step"
    console.print(f"{format_seconds(best['step_seconds']['total'])} a step, {speed}; {micro}", soft_wrap=True)
    console.print(f"why: {best['reason'].partition(': ')[2]}")


def _bar(name: str, parts: Mapping[str, float], whole: float, unit: str, console: Console) -> None:
    """Print a bar of all parts, and below it what each colour means."""
    shown = {part: value for part, value in parts.items() if part != "total" and value > _SMALL * whole}
    bar, legend = Text(f"{name:<8}"), Text()
    for index, (part, value) in enumerate(sorted(shown.items(), key=lambda item: -item[1])):
        colour = _COLOURS[index % len(_COLOURS)]
        bar.append("█" * max(1, round(WIDTH * value / max(whole, parts["total"]))), style=colour)
        legend.append("■ ", style=colour)
        legend.append(f"{part if name == 'memory' else describe_term(part)} {value:.3g}  ")
    bar.append(f"  {parts['total']:.4g} " + unit.format(whole))
    console.print(bar, soft_wrap=True)
    console.print(Padding(legend, (0, 0, 0, 8)))


def advice_of(beyond: Answer) -> list[str]:
    """Return sentences about what search/whole_run.py computed beyond the step."""
    run, saves = beyond["whole_run"], beyond["checkpoints"]
    hours = f"{format_span(run['seconds'])}, {format_figure(run['device_hours'])} device hours"
    text = f"all {counted(run['steps'], 'step')} ({format_count(run['tokens'])} tokens) take {hours}"
    if run["kwh"] is not None:
        text += f", {format_energy(run['kwh'])}"
    if run["money"] is not None:
        text += f", {format_figure(run['money'])} in money"
    advice = saves["advice"]
    every = f"save every {counted(advice['every_steps'], 'step')} ({format_span(advice['every_seconds'])})"
    gigabytes = format_figure(saves["storage_bytes"] / 1e9)
    storage = f"{gigabytes} GB on storage of {saves['storage_gb_s']:g} GB/s in all (--storage-gb-per-s)"
    sentences = [text, f"{every}: {advice['expected_goodput']:.1%} of the time counts, {storage}"]
    if (hide := beyond["to_hide"]) is not None:
        where = "between nodes" if hide["link"] == "between" else "inside a node"
        needed = "no bandwidth" if hide["needed_gb_s"] is None else f"{hide['needed_gb_s']:.3g} GB/s a device"
        enough = hide["needed_gb_s"] is not None and hide["needed_gb_s"] <= hide["has_gb_s"]
        rest = "; they still cost the memory and cores that they share with the computing" if enough else ""
        sentences.append(
            f"to hide gathers and gradient sums {where} takes {needed}, and there are "
            f"{hide['has_gb_s']:.3g}{rest}"
        )
    return [*sentences, *_on_compression(beyond)]


def _on_compression(beyond: Answer) -> Iterator[str]:
    """Yield which codec would make a step quicker, and whether leaving out the current one would."""
    step, choices = beyond["step_seconds"], {choice["name"]: choice for choice in beyond["slow_links"]}
    if (codec := beyond["compression"]) is not None:
        quicker = step / choices[codec]["step_seconds"]
        accept = f'write layout.compression = "{codec}", or layout = "auto+lossy", to accept that'
        effect = f"would make a step {quicker:.3g} times quicker, and change the numbers"
        yield f"gradients sent as {codec} {effect}: {accept}"
    if (plain := choices.get(PLAIN)) is not None and plain["step_seconds"] < step:
        without = format_seconds(plain["step_seconds"])
        shorter = f"a step without it takes {without}"
        yield f"compression does not pay here: {shorter}; leave layout.compression out"


def _rejected(answer: Answer, console: Console) -> None:
    reasons = "; ".join(f"{reason} {count:,}" for reason, count in answer["rejected"].items())
    fitting = f"{answer['considered']:,} candidates in {answer['seconds']:.1f} s"
    console.print(f"{fitting}{'; refused: ' + reasons if reasons else ''}", soft_wrap=True, style="dim")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table with numbers aligned to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 or column in _WORDS else "right")
    for row in rows:
        result.add_row(*row)
    return result


_WORDS = ("layout", "what breaks it", "why")
