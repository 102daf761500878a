"""Compare the predictions for a step with the measurements, term by term.

plan.json contains the planner's prediction of a run. A run measures fewer things than the planner
distinguishes, so terms are added up to what one clock can measure:

| what                  | predicted terms                         | measured                            |
| --------------------- | --------------------------------------- | ----------------------------------- |
| computing             | matmul, attention, elementwise, launch, | span `forward_backward`             |
|                       | recompute                               |                                     |
| exposed communication | tensor, context, expert, data, replica, | span `exposed_communication`        |
|                       | links, pipeline_sends                   |                                     |
| optimizer             | optimizer                               | span `optimizer`                    |
| reading data          | none: batches are read ahead            | the part of the span `data` that no |
|                       |                                         | other span covers                   |
| unclaimed             | none                                    | the rest of the step                |

In a pipeline, an idle rank waits for a message, and no clock can separate that wait from the time of the
message itself: bubble and imbalance are then counted as communication. On a GPU some waits cannot be
separated from computing at all (FSDP2 waits on its own streams; the waits of the tensor, context, expert and
pipeline axes are between kernels): both are then one row, and each by itself is null. The seconds of a term
are its share of all steps, times the median step, so that they add up to the step time.

Times, memory and bytes are those of rank 0. The planner predicts the memory of the fullest rank, and the
computing of the average one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.observe.format import format_bytes, format_count
from shardwise.observe.records import Record, median_of
from shardwise.observe.spans import EXPOSED
from shardwise.plans.plan import PredictedFlow, PredictedStep
from shardwise.plans.step_terms import COMMUNICATION, COMPUTING, IDLE
from shardwise.plurals import counted
from shardwise.units import GIB

Row = dict[str, Any]
"""Fields `what`, `kind` (seconds, rate, memory, bytes), `predicted`, `measured` and `ratio` (measured /
predicted), null where unknown. Rows of seconds also have the planner's `terms`, and rows of bytes the
`predicted_calls` and `measured_calls` of a step.
"""

_EXPERTS = "all_to_all/expert"
"""The exchange of rows with experts on other devices, in the ledger."""
_CLOSE = 0.05
"""Disagreements below this fraction are not mentioned."""
_COLUMNS: dict[str, JustifyMethod] = {
    "what": "left",
    "predicted": "right",
    "measured": "right",
    "ratio": "right",
}


def compare(
    predicted: PredictedStep, steps: Sequence[Record], waits_are_known: bool, on_cpu: bool
) -> list[Row]:
    """Return a row for every predicted term, with what these steps measured."""
    rows = [*_times(predicted, steps, waits_are_known), *_memory(predicted["memory_gib"], steps, on_cpu)]
    return rows + list(_collectives(predicted["bytes"], steps))


def waits_are_known(steps: Sequence[Record]) -> bool:
    """Return whether the waiting time of these steps was measured separately from their computing time."""
    return all(EXPOSED in step.get("spans", {}) for step in steps)


def _times(predicted: PredictedStep, steps: Sequence[Record], apart: bool) -> Iterator[Row]:
    """Yield the rows of seconds. `apart` says whether waits were measured separately from computing."""
    terms, seconds = predicted["step_seconds"], statistics.median(step["seconds"] for step in steps)
    spans = _spans(steps, seconds)
    yield _row("step time", "seconds", terms["total"], seconds)
    busy = (*COMPUTING, "offload") if terms.get("offload") else COMPUTING
    waits = (*COMMUNICATION, *IDLE) if any(terms.get(name) for name in IDLE) else COMMUNICATION
    computing = "computing and offload" if terms.get("offload") else "computing"
    waiting = (
        "exposed communication, bubble, imbalance" if waits != COMMUNICATION else "exposed communication"
    )
    yield _sum(computing, terms, busy, spans["forward_backward"] if apart else None)
    yield _sum(waiting, terms, waits, spans[EXPOSED] if apart else None)
    if not apart:
        both = _added(spans["forward_backward"], spans[EXPOSED])
        yield _sum("computing and communication together", terms, (*busy, *waits), both)
    yield _sum("optimizer", terms, ("optimizer",), spans["optimizer"])
    for name, key in (("reading data", "data"), ("unclaimed", "other")):
        yield _sum(name, terms, (), spans[key])
    yield _row(
        "tokens a second", "rate", predicted["tokens_per_second"], median_of(steps, "tokens_per_second")
    )


def _spans(steps: Sequence[Record], seconds: float) -> dict[str, float | None]:
    """Return the seconds of each span in a step of `seconds`, and of `other`, which belongs to no span.

    They add up to the step. On a GPU, batches are read while the device computes, so only the part of `data`
    that no other span covers counts.
    """
    total = math.fsum(step["seconds"] for step in steps)
    spans: dict[str, float | None] = {}
    for name in ("forward_backward", EXPOSED, "optimizer", "data"):
        known = [step["spans"][name] for step in steps if name in step.get("spans", {})]
        spans[name] = math.fsum(known) * seconds / total if known and total else None
    left = max(0.0, seconds - sum(spans[name] or 0.0 for name in ("forward_backward", EXPOSED, "optimizer")))
    if spans["data"] is not None:
        spans["data"] = min(spans["data"], left)
    spans["other"] = None if spans["forward_backward"] is None else left - (spans["data"] or 0.0)
    return spans


def _memory(predicted: Mapping[str, float], steps: Sequence[Record], on_cpu: bool) -> Iterator[Row]:
    """Yield the peak as the device counts it, and then each kind of memory.

    torch's allocator on a GPU does not see the runtime's own memory. A run cannot measure the kinds
    separately.
    """
    known = [step["memory_bytes"] for step in steps if step.get("memory_bytes") is not None]
    without = 0.0 if on_cpu else predicted.get("overhead", 0.0)
    name = "peak memory" if on_cpu else "peak memory, without overhead"
    yield _row(name, "memory", (predicted["total"] - without) * GIB, max(known, default=None))
    for kind, value in predicted.items():
        if kind != "total":
            yield _row(f"memory of {kind}", "memory", value * GIB, None)


def _collectives(predicted: Sequence[PredictedFlow], steps: Sequence[Record]) -> Iterator[Row]:
    """Yield the bytes and calls of each kind and axis. A collective that is not in the ledger did not
    happen.
    """
    planned = {f"{flow['kind']}/{flow['axis']}": flow for flow in predicted}
    ledgers = [step["collectives"] for step in steps if "collectives" in step]
    nothing = {"count": 0, "bytes": 0}
    for key in sorted({*planned, *(key for ledger in ledgers for key in ledger)}):
        typical = {
            what: statistics.median(ledger.get(key, nothing)[what] for ledger in ledgers) if ledgers else None
            for what in nothing
        }
        plan = planned.get(key, nothing)
        calls = {"predicted_calls": plan["count"], "measured_calls": typical["count"]}
        yield _row(key, "bytes", plan["bytes"], typical["bytes"]) | calls


def _sum(what: str, terms: Mapping[str, float], names: Sequence[str], measured: float | None) -> Row:
    total = math.fsum(terms.get(name, 0.0) for name in names)
    return _row(what, "seconds", total, measured) | {"terms": list(names)}


def _row(what: str, kind: str, predicted: float, measured: float | None) -> Row:
    ratio = measured / predicted if measured is not None and predicted else None
    return {"what": what, "kind": kind, "predicted": predicted, "measured": measured, "ratio": ratio}


def _added(first: float | None, second: float | None) -> float | None:
    return None if first is None else first + (second or 0.0)


# -- for people ----------------------------------------------------------------------------------------------


def show_comparison(rows: Sequence[Row], console: Console) -> None:
    """Print the table, the notes about it, and the largest disagreement in words."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for name, justify in _COLUMNS.items():
        table.add_column(name, justify=justify, no_wrap=name != "what", overflow="fold")
    for row in rows:
        if not _is_part_of_memory(row):
            cells = (_label(row), _value(row, "predicted"), _value(row, "measured"), _ratio(row))
            table.add_row(*map(Text, cells))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for line in (*_notes(rows), largest_disagreement(rows)):
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def largest_disagreement(rows: Sequence[Row]) -> str:
    """Return a sentence about the largest disagreement.

    That is the term with the largest factor among those that matter to the step or to memory.
    """
    step = max(rows[0]["predicted"], rows[0]["measured"])
    known = [row for row in rows[1:] if row["measured"] is not None and row["kind"] != "rate"]
    gaps = [(_difference(row, step), row) for row in known]
    if not gaps:
        return "Nothing but the step time was measured."
    mattering = [gap for gap in gaps if gap[0] >= _CLOSE]
    if not mattering:
        return f"All that was measured is within {_CLOSE:.0%} of the prediction.".replace("%", " %")
    share, row = max(mattering, key=lambda gap: (_factor(*gap), gap[0]))
    portion = f"{share:.0%} of ".replace("%", " %") + ("the step" if row["kind"] == "seconds" else "it")
    values = f"{_value(row, 'predicted')} predicted, {_value(row, 'measured')} measured"
    return f"Largest disagreement: {_label(row)}, {values} ({portion})."


def _difference(row: Row, step: float) -> float:
    """Return the difference as a fraction of the step, or of the value itself."""
    whole = step if row["kind"] == "seconds" else max(row["predicted"], row["measured"])
    return abs(row["measured"] - row["predicted"]) / whole if whole else 0.0


def _factor(share: float, row: Row) -> float:
    """Return by which factor a prediction is off. A term that was not predicted counts as the whole being
    off.
    """
    low, high = sorted((row["predicted"], row["measured"]))
    return float(high / low) if low else 1.0 + share if row["kind"] == "seconds" else math.inf


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    parts = [row for row in rows if _is_part_of_memory(row) and row["predicted"]]
    if parts:
        yield f"Predicted memory: {', '.join(map(_kind_of_memory, parts))}. A run measures only their sum."
    if any("bubble" in row.get("terms", ()) and row["measured"] is not None for row in rows):
        yield (
            "A pipeline rank with nothing to do waits for a message: bubble and imbalance are measured as "
            "communication."
        )
    if any(row["what"] == _EXPERTS and row["measured"] not in (None, row["predicted"]) for row in rows):
        yield "The router decides how many rows go to experts on other devices; an even load was predicted."
    if any(row["what"].startswith("computing and communication") for row in rows):
        yield "On this device waits cannot be told from computing: only both together were measured."


def _kind_of_memory(row: Row) -> str:
    return f"{row['what'].removeprefix('memory of ')} {format_bytes(row['predicted'])}"


def _is_part_of_memory(row: Row) -> bool:
    return bool(row["kind"] == "memory" and row["measured"] is None and row["what"].startswith("memory of "))


def _label(row: Row) -> str:
    if row["kind"] != "bytes":
        return str(row["what"])
    kind, _, axis = row["what"].partition("/")
    return f"{kind.replace('_', ' ')} over {axis}"


def _value(row: Row, which: str) -> str:
    value = row[which]
    if value is None:
        return "n/a"
    if row["kind"] == "seconds":
        return _seconds(value)
    if row["kind"] == "bytes":
        return f"{format_bytes(value)} in {_calls(row[f'{which}_calls'])}"
    return format_bytes(value) if row["kind"] == "memory" else format_count(value)


def _ratio(row: Row) -> str:
    """Return the ratio as text. Bytes and calls are counted on both sides: they are equal, or the difference
    is shown.
    """
    if row["measured"] is None or (row["ratio"] is None and row["kind"] != "bytes"):
        return "n/a"
    if row["kind"] != "bytes":
        return f"{row['ratio']:.2f}" if row["ratio"] < 9.995 else f"{row['ratio']:.3g}"
    bytes, calls = row["measured"] - row["predicted"], row["measured_calls"] - row["predicted_calls"]
    if not bytes and not calls:
        return "equal"
    return ", ".join(f"{excess:+,} {unit}" for excess, unit in ((bytes, "bytes"), (calls, "calls")) if excess)


def _calls(count: float) -> str:
    return counted(int(count) if count == int(count) else count, "call")


def _seconds(value: float) -> str:
    """Return seconds with three digits, in a unit that shows them."""
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1e3 * value:.3g} ms"
