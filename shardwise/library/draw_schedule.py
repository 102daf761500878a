"""Draw a pipeline schedule: as text for a terminal, as SVG for a page. Time runs to the right, with one row
per rank.

Both drawings show a simulated `Timeline`. In text a cell is one unit of time, so costs should be whole
numbers, as the default ones are. Waiting time is drawn as dots in text and left empty in SVG: the emptier the
drawing, the larger the bubble.
"""

from __future__ import annotations

from html import escape

from shardwise.plans.schedule import Action
from shardwise.plans.timeline import Span, Timeline, peak_in_flight
from shardwise.plurals import counted

COLUMNS = 120
COLOURS = {"F": "#7fb2e5", "B": "#8fc98f", "I": "#b9dd8b", "W": "#f3c77a"}
MEANING = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
ROW, LEFT, TOP = 28, 64, 56
WIDEST = 1600


def summary(timeline: Timeline) -> str:
    """Return one line with the size of the schedule, its bubble, and the activations that a rank holds."""
    schedule = timeline.schedule
    peak = counted(max(peak_in_flight(schedule)), "activation")
    return f"{schedule.name}: {_size(timeline)}; bubble {timeline.bubble:.1%}, at most {peak} on a rank"


def _size(timeline: Timeline) -> str:
    schedule = timeline.schedule
    counts = {"rank": schedule.ranks, "stage": schedule.stages, "micro-batch": schedule.micro_batches}
    return ", ".join(counted(count, word) for word, count in counts.items())


def draw_text(timeline: Timeline, columns: int = COLUMNS) -> str:
    """Return a text drawing with one row per rank and one cell per unit of time. A longer drawing is cut, and
    says so."""
    spans = [span for row in timeline.spans for span in row]
    width = max(len(_label(span.action, timeline)) for span in spans) + 1
    margin = len(f"rank {len(timeline.spans) - 1}  ")
    cells = round(timeline.makespan)
    shown = min(cells, max(1, (columns - margin) // width))
    lines = []
    for rank, row in enumerate(timeline.spans):
        text = _row([span for span in row if span.start < shown], timeline, width, shown)
        lines.append(f"{f'rank {rank}':<{margin}}{text}".rstrip())
    if shown < cells:
        lines.append(f"(the first {shown} of {cells} units of time; the SVG drawing has them all)")
    return "\n".join(lines)


def _row(spans: list[Span], timeline: Timeline, width: int, shown: int) -> str:
    pieces, at = [], 0
    for span in spans:
        start, end = round(span.start), min(round(span.end), shown)
        pieces.append(("." * (width - 1) + " ") * (start - at))
        pieces.append(f"{_label(span.action, timeline):-<{(end - start) * width - 1}} ")
        at = end
    return "".join(pieces) + ("." * (width - 1) + " ") * (shown - at)


def _label(action: Action, timeline: Timeline) -> str:
    """Return the label of an action. The stage is named only if a rank has several."""
    several = timeline.schedule.stages > timeline.schedule.ranks
    return str(action) if several else f"{action.kind}{action.micro_batch}"


def draw_svg(timeline: Timeline) -> str:
    """Return a self-contained SVG with one box per action, coloured by kind, and paler for the later stages
    of a rank."""
    unit = min(28.0, (WIDEST - LEFT) / timeline.makespan)
    width, height = LEFT + unit * timeline.makespan + 16, TOP + ROW * len(timeline.spans) + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" role="img">',
        f"<title>{escape(summary(timeline))}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        *_heading(timeline),
    ]
    peaks = peak_in_flight(timeline.schedule)
    for rank, row in enumerate(timeline.spans):
        top = TOP + ROW * rank
        parts.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top + 2}" width="{unit * timeline.makespan:.1f}" height="{ROW - 4}" '
            f'fill="#f2f2f2"/>'
        )
        parts.append(f"<g><desc>at most {peaks[rank]} activations</desc>")
        parts += [_box(span, timeline, top, unit) for span in row]
        parts.append("</g>")
    parts += [*_legend(timeline, TOP + ROW * len(timeline.spans) + 14), "</svg>"]
    return "\n".join(parts) + "\n"


def _heading(timeline: Timeline) -> list[str]:
    schedule = timeline.schedule
    peaks = ", ".join(map(str, peak_in_flight(schedule)))
    return [
        f'<text x="8" y="20" font-size="15" font-weight="bold">{escape(schedule.name)}: bubble '
        f"{timeline.bubble:.1%}</text>",
        f'<text x="8" y="40">{_size(timeline)}; peak activations by rank: {peaks}</text>',
    ]


def _box(span: Span, timeline: Timeline, top: int, unit: float) -> str:
    action = span.action
    left, width = LEFT + unit * span.start, unit * (span.end - span.start)
    stages = timeline.schedule.stages_of(timeline.schedule.rank_of_stage[action.stage])
    opacity = 1 - 0.6 * stages.index(action.stage) / len(stages)
    middle = f'x="{left + width / 2:.1f}" y="{top + 17}" text-anchor="middle"'
    label = f"<text {middle}>{action.micro_batch}</text>" if width >= 9 else ""
    return (
        f'<rect x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 4}" '
        f'fill="{COLOURS[action.kind]}" fill-opacity="{opacity:.2f}" stroke="white">'
        f"<title>{action}: {span.start:g} to {span.end:g}</title></rect>{label}"
    )


def _legend(timeline: Timeline, top: int) -> list[str]:
    used = {span.action.kind for row in timeline.spans for span in row}
    parts, left = [], LEFT
    for kind in [kind for kind in COLOURS if kind in used]:
        parts.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{left + 16}" y="{top + 10}">{MEANING[kind]}</text>')
        left += 34 + 7 * len(MEANING[kind])
    if timeline.schedule.stages > timeline.schedule.ranks:
        parts.append(f'<text x="{left}" y="{top + 10}">paler: later stages of the rank</text>')
    return parts
