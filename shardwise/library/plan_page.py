"""Render the planner's answer as one HTML page, which can be opened by a double click, printed, or sent to a
colleague.

The page consists of the JSON object of `shardwise plan --json` and a template, `plan_page.html`, that draws
it. What is read (headline, config, reasons) is inserted as text here; what is drawn or filtered is inserted
as data, and the script in the template draws it. Nothing is loaded from anywhere, and a content security
policy in the page forbids it, so a page always shows the same.

A search may try a hundred thousand layouts for thousands of ranks, and a page that embeds them all opens
slowly or not at all. So the size of the page is bounded. Candidates are stored as columns (a constant column
as one value, words by number, numbers with four digits), and only the best `CANDIDATES`. A pipeline with too
many actions shows some of its ranks. A large cluster is drawn with one cell per node, or per several nodes,
with the range of their coordinates. The page says so where it leaves something out.

Text from outside (job names, reasons) is escaped. The embedded JSON contains no `<`, so no name can end the
script that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from math import ceil, isfinite
from string import Template
from typing import TYPE_CHECKING

from shardwise.config import AXES, RANK_AXES
from shardwise.library.draw_schedule import COLOURS as ACTION_COLOURS
from shardwise.library.draw_schedule import MEANING

if TYPE_CHECKING:
    from shardwise.files import Json
    from shardwise.library.plan_show import Answer

CANDIDATES = 20_000
"""Largest number of candidates on a page."""
SPANS = 4_000
"""Number of boxes in a timeline above which only some ranks are shown."""
CELLS = 1_024
"""Largest number of cells in the map of ranks."""
LAYOUT = (*AXES, "zero", "stages_per_rank", "attention", "offload")
SETTINGS = ("micro_batch", "accumulation", "schedule", "recompute", "fits", "kind", "mfu")

# Every colour has a contrast of 3:1 against a white and a near-black page. Things with the same name have the
# same colour everywhere on the page.
AXIS_COLOURS = {
    "tensor": "#ce6f33",
    "context": "#b48c2b",
    "expert": "#a758a1",
    "data": "#bc4a3f",
    "replica": "#d06a84",
    "pipeline": "#8c5d2b",
}
TERM_COLOURS = {
    "matmul": "#336cb5",
    "attention": "#3c96c5",
    "elementwise": "#329e9e",
    "launch": "#1c7e92",
    "recompute": "#7377c6",
    "optimizer": "#439458",
    "bubble": "#8d9399",
    "imbalance": "#636d77",
    **{axis: colour for axis, colour in AXIS_COLOURS.items() if axis != "pipeline"},
    "pipeline_sends": AXIS_COLOURS["pipeline"],
    "links": "#6f8a2f",
    "offload": "#885cb5",
    "other": "#6a6966",
}
MEMORY_COLOURS = {
    "weights": "#336cb5",
    "gradients": "#289da9",
    "optimizer": TERM_COLOURS["optimizer"],
    "activations": "#ce6f33",
    "logits": "#b48c2b",
    "gathered": "#885cb5",
    "buffers": "#bc6398",
    "overhead": "#7b8187",
}


class _Page(Template):
    """A template whose placeholders are written `@@name`, because `$` occurs in the script."""

    delimiter = "@@"


def render_page(answer: Answer) -> str:
    """Return one self-contained HTML page for the object that `shardwise plan --json` prints."""
    best = answer["best"]
    template = resources.files("shardwise.library").joinpath("plan_page.html").read_text(encoding="utf-8")
    return _Page(template).substitute(
        title=escape(f"{answer['job']} on {answer['cluster']['name']}"),
        job=escape(str(answer["job"])),
        cluster=escape(_cluster_line(answer)),
        winner=escape(_winner_line(best)),
        reason=escape(best.get("reason", "")),
        tiles=_tiles(answer),
        config=escape(best.get("config", "")),
        runner_up=_runner_up(answer.get("runner_up")),
        rejected=_rejected(answer.get("rejected", {})),
        binding=_sentences(
            answer.get("binding", ()), "Nothing binds: the fastest layout is allowed and fits."
        ),
        advice=_sentences(answer.get("advice", ()), "None."),
        footer=escape(_footer(answer)),
        data=_script_safe(_drawn(answer)),
    )


def _cluster_line(answer: Answer) -> str:
    cluster, model = answer["cluster"], answer.get("model", {})
    nodes = f"{cluster['nodes']:,} node{'s' * (cluster['nodes'] != 1)} of {cluster['devices_per_node']}"
    parts = [f"{cluster['name']}: {cluster['devices']:,} x {cluster['device']} in {nodes}"]
    if parameters := model.get("parameters"):
        active = model.get("active_parameters", parameters)
        active_only = f" ({_short(active)} active)" if active != parameters else ""
        parts.append(f"{_short(parameters)} parameters{active_only}")
    if tokens := answer.get("tokens_per_step"):
        parts.append(f"{tokens:,} tokens a step")
    return "; ".join(parts)


def _winner_line(best: Answer) -> str:
    return f"{best['kind']}, micro-batch {best['micro_batch']} x {best['accumulation']}"


def _tiles(answer: Answer) -> str:
    best = answer["best"]
    limit, total = best["memory_limit_gib"], best["memory_gib"]["total"]
    memory = "peak memory" if best.get("fits", True) else "peak memory: does not fit"
    figures = [
        (f"{best['step_seconds']['total']:.4g} s", "a step"),
        (f"{best['tokens_per_second_per_device']:,.0f}", "tokens/s per device"),
        ("n/a" if best["mfu"] is None else f"{best['mfu']:.1%}", "MFU"),
        (f"{total:.1f} of {limit:.1f} GiB", memory),
    ]
    return "\n".join(f"<div><dt>{label}</dt><dd>{figure}</dd></div>" for figure, label in figures)


def _short(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


def _runner_up(candidate: Answer | None) -> str:
    if candidate is None:
        return "No layout of another kind fits."
    kind, loses_on = escape(candidate["kind"]), escape(candidate.get("loses_on", ""))
    return f"Next best of another kind: <b>{kind}</b>. {loses_on}"


def _rejected(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return "<p>None was refused.</p>"
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    rows = "".join(
        f"<tr><td>{escape(reason)}</td><td class=n>{count:,}</td></tr>" for reason, count in ordered
    )
    head = "<tr><th scope=col>Reason</th><th scope=col class=n>Layouts</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _sentences(sentences: Sequence[str], otherwise: str) -> str:
    if not sentences:
        return f"<p>{escape(otherwise)}</p>"
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _footer(answer: Answer) -> str:
    searched = f"{answer['considered']:,} layouts considered in {answer['seconds']:.2g} s"
    convention = answer.get("model", {}).get("flop_convention")
    return f"{searched}; shardwise {answer['version']}" + (f"; MFU counts {convention}" if convention else "")


def _drawn(answer: Answer) -> Json:
    """Return the data that the script of the page draws."""
    best, runner_up = answer["best"], answer.get("runner_up")
    candidates = sorted(
        answer.get("candidates", ()),
        key=lambda candidate: (not candidate["fits"], candidate["step_seconds"]["total"]),
    )
    return {
        "colours": {
            "memory": MEMORY_COLOURS,
            "seconds": TERM_COLOURS,
            "axis": AXIS_COLOURS,
            "action": ACTION_COLOURS,
        },
        "meaning": MEANING,
        "limit": best["memory_limit_gib"],
        "device": answer["cluster"].get("memory_gib"),
        "best": _flat(best),
        "runner_up": _flat(runner_up) if runner_up else None,
        "timeline": _timeline(best.get("timeline")),
        "map": _cells(best.get("map") or ()),
        "links": [dict(link) for link in best.get("links") or ()],
        "bytes": [dict(flow) for flow in best.get("bytes") or ()],
        "found": max(answer.get("found", 0), len(candidates)),
        "candidates": _columns([_flat(candidate) for candidate in candidates[:CANDIDATES]]),
    }


def _flat(candidate: Answer) -> Json:
    """Return a candidate as one row of a table: `memory weights`, `seconds matmul` and so on, and its
    settings."""
    layout = candidate["layout"]
    row = {name: layout[name] for name in LAYOUT if layout.get(name) is not None}
    row.update({name: candidate[name] for name in SETTINGS})
    row["tokens"] = candidate["tokens_per_second_per_device"]
    row.update({f"memory {kind}": value for kind, value in candidate["memory_gib"].items()})
    row.update({f"seconds {term}": value for term, value in candidate["step_seconds"].items()})
    return {name: _rounded(value) for name, value in row.items()}


def _rounded(value: object) -> object:
    """Return a number with four digits, which are more than a picture shows, and None for infinity, which
    JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if isfinite(value) else None


def _columns(rows: Sequence[Json]) -> Json:
    """Return a list of rows as columns: `{"rows": n, "columns": {name: column}}`."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {"rows": len(rows), "columns": {name: _column([row.get(name) for row in rows]) for name in names}}


def _column(values: list[object]) -> object:
    """Return a column as a list; as one value if all are equal; or texts as indices into a list of the
    distinct texts."""
    distinct = dict.fromkeys(values)
    if len(distinct) == 1:
        return values[0]
    if any(isinstance(value, str) for value in distinct):
        index = {text: number for number, text in enumerate(distinct)}
        return {"words": list(distinct), "at": [index[value] for value in values]}
    return [_as_integer(value) for value in values]


def _as_integer(value: object) -> object:
    """Return a whole number or a truth value as an integer, which is shorter in JSON."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def _timeline(timeline: Answer | None) -> Json | None:
    """Return the rows of a pipeline's ranks. Where all would be too many boxes, evenly spread ranks and the
    last are shown."""
    if timeline is None or len(timeline["rank_rows"]) < 2:
        return None
    rows = timeline["rank_rows"]
    stride = ceil(sum(map(len, rows)) / SPANS)
    shown = sorted({*range(0, len(rows), stride), len(rows) - 1})
    return {
        "ranks": len(rows),
        "makespan": timeline["makespan"],
        "micro_batches": timeline.get("micro_batches"),
        "of": timeline.get("of"),
        "rows": [{"rank": rank, "spans": [_span(span) for span in rows[rank]]} for rank in shown],
    }


def _span(span: Answer) -> list[object]:
    return [span["kind"], span["stage"], span["micro_batch"], _rounded(span["start"]), _rounded(span["end"])]


def _cells(ranks: Sequence[Mapping[str, int]]) -> Json:
    """Return one cell per rank; on large clusters one per node or per several nodes, with the first and last
    coordinate on each axis."""
    ordered = sorted(ranks, key=lambda entry: (entry["node"], entry["rank"]))
    if len(ordered) <= CELLS:
        groups = [[entry] for entry in ordered]
        nodes_of_a_cell = 0
    else:
        nodes_of_a_cell = ceil(len({entry["node"] for entry in ordered}) / CELLS)
        by_cell = groupby(ordered, key=lambda entry: entry["node"] // nodes_of_a_cell)
        groups = [list(group) for _, group in by_cell]
    return {
        "nodes_of_a_cell": nodes_of_a_cell,
        "sizes": {axis: 1 + max((entry[axis] for entry in ordered), default=0) for axis in RANK_AXES},
        "cells": [
            [group[0]["node"], group[-1]["node"], group[0]["rank"], group[-1]["rank"], _ranges(group)]
            for group in groups
        ],
    }


def _ranges(group: Sequence[Mapping[str, int]]) -> list[list[int]]:
    return [[min(entry[axis] for entry in group), max(entry[axis] for entry in group)] for axis in RANK_AXES]


def _script_safe(data: Json) -> str:
    """Return JSON that no HTML parser takes for a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
