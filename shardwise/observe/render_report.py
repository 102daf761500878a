"""The report of a run for people: a curve of the loss, bars for time, goodput and experts, and tables.

`summarise` (observe/summary.py) computes the numbers, and `render` only draws them, so `--json` and the
terminal always agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise.config import AXES, Layout
from shardwise.errors import printable
from shardwise.observe.compare_prediction import show_comparison
from shardwise.observe.format import format_bytes, format_count, format_duration, format_percent
from shardwise.observe.spans import EXPOSED
from shardwise.observe.summary import Summary, summarise
from shardwise.observe.text_plots import bar, line_plot
from shardwise.plurals import counted
from shardwise.units import GIB

__all__ = ["render", "summarise"]

_BAR = 40
"""Maximum number of characters of a bar."""
_LOST = 0.1
"""Fraction of a tensor below the range of float8 above which a warning is shown."""
_EXPERTS = 32
"""Maximum number of experts that are drawn. If there are more, the busiest and the idlest half of it are."""
_CROP: OverflowMethod = "crop"
"""How cells that do not fit are cut. By default rich ends them with a character that is not ASCII."""
_TIME_COLUMNS: tuple[JustifyMethod, ...] = ("left", "right", "left")
_EXPERT_COLUMNS: tuple[JustifyMethod, ...] = ("right", "right", "left")
_PART_COLUMNS: tuple[JustifyMethod, ...] = ("left", "left", "right", "right")
_FAULT_COLUMNS: dict[str, JustifyMethod] = {
    "at step": "right",
    "what": "left",
    "where": "left",
    "recovered": "right",
    "steps lost": "right",
    "from": "left",
    "cause": "left",
}
_LABELS = {"forward_backward": "forward and backward", EXPOSED: "exposed communication"}
_PARTS = {
    "productive": ("productive", "green", "P"),
    "stragglers": ("waiting for slow ranks", "magenta", "S"),
    "data": ("waiting for data", "yellow", "D"),
    "checkpoint": ("standing still for saves", "blue", "C"),
    "evaluation": ("evaluation", "cyan", "E"),
    "recovery": ("recovery", "red", "R"),
    "lost": ("lost work", "bright_red", "L"),
    "start_up": ("start-up", "white", "U"),
    "other": ("other", "bright_black", "O"),
}
"""For each part of goodput, its label, its colour, and the letter that is used where there are no colours."""
_FAULTS = 12
"""Maximum number of faults that are listed. If there are more, the last ones are."""
_COLOURS = {
    "data": "yellow",
    "forward_backward": "green",
    EXPOSED: "red",
    "optimizer": "blue",
    "other": "bright_black",
}


def render(summary: Summary, console: Console) -> None:
    """Draw the summary of a run. Its texts come from files, so control characters in them are escaped."""
    summary = _printable(summary)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, overflow=_CROP)
    grid.add_column(overflow="fold")
    for name, value in _overview(summary):
        grid.add_row(Text(name), Text(value))
    title = Text(summary["run"], style="bold", overflow=_CROP)
    console.print(Panel(grid, title=title, title_align="left", border_style="cyan", expand=False))
    _curve(summary, console)
    _time(summary, console)
    _goodput(summary["goodput"], console)
    _faults(summary["goodput"], console)
    _float8(summary["float8"], console)
    _experts(summary["experts"], console)
    _collectives(summary["collectives"], console)
    if summary["predicted_and_measured"]:
        _heading(
            console, "predicted and measured", f"a step of rank 0, median of {summary['measured_steps']}"
        )
        show_comparison(summary["predicted_and_measured"], console)


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_printable(key): _printable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(part) for part in value]
    return printable(value) if isinstance(value, str) else value


def _overview(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the first table."""
    loss, speed = summary["loss"], summary["tokens_per_second"]
    yield "steps", _progress(summary)
    lowest = f"lowest {_loss(loss['minimum'])} at step {loss['minimum_step']}"
    yield "loss", f"{_loss(loss['first'])} to {_loss(loss['last'])}, {lowest}"
    if summary["held_out"]:
        newest = summary["held_out"][-1]
        yield "held-out loss", f"{_loss(newest['loss'])} at step {newest['step']}"
    if speed["median"] is not None:
        last = f"last step {_amount(speed['last'])}"
        yield "speed", f"{_amount(speed['median'])} tokens/s ({last}){_samples(summary)}"
    else:
        yield "speed", _samples(summary).removeprefix(", ")
    yield "MFU", _mfu(summary)
    yield "peak memory", _memory(summary)
    yield from _communication(summary["communication"])
    yield from _numerics(summary)
    yield from _choices(summary)
    yield "checkpoints", _checkpoints(summary["checkpoints"])
    if summary["checkpoints"]["advice"]:
        yield "save", _advice(summary["checkpoints"]["advice"])
    if summary["skipped_steps"]:
        yield "skipped steps", ", ".join(map(str, summary["skipped_steps"]))
    if damaged := {name: count for name, count in summary["damaged_lines"].items() if count}:
        lines = ", ".join(f"{count} of {name}" for name, count in damaged.items())
        yield "damaged lines", f"{lines} (skipped)"
    if summary["events"]:
        yield "events", ", ".join(f"{name} {count}" for name, count in summary["events"].items())


def _communication(communication: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows about communication: in total, and for each axis."""
    if communication["axes"]:
        hidden = communication["overlap"]
        overlap = "" if hidden is None else f", {format_percent(hidden)} of it hidden"
        efficiency = format_percent(communication["efficiency"])
        yield "communication", f"{efficiency} of a step does not wait for it{overlap}"
    for axis, used in communication["axes"].items():
        if used["seconds"] is not None:
            yield "", f"{axis}: {_used(used)}"


def _numerics(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows that only some runs have: load, staleness, updates, float8 and experts."""
    if summary["load"]["imbalance"] is not None:
        yield "load", _load(summary["load"])
    if summary["staleness"]:
        late = f"; {summary['dropped']} gradients came too late and were dropped"
        yield "staleness", _staleness(summary["staleness"]) + (late if summary["dropped"] else "")
    if summary["updates"]:
        yield "updates", _updates(summary["updates"])
    if summary["float8"]:
        yield "float8", _fit(summary["float8"])
    if summary["experts"]:
        imbalance = summary["experts"]["imbalance"]
        worst = f"worst {imbalance['worst']:.2f} at step {imbalance['worst_step']}"
        yield "busiest expert", f"{imbalance['last']:.2f} times an even load, {worst}"


def _staleness(histogram: Mapping[str, int]) -> str:
    """Return how old, in updates, the weights were with which gradients were computed, with their
    frequencies.
    """
    total = sum(histogram.values())
    bars = [f"{updates}: {format_percent(count / total)}" for updates, count in histogram.items()]
    mean = sum(int(updates) * count for updates, count in histogram.items()) / total
    return f"{mean:.2f} updates on average ({', '.join(bars[:12])}{', …' if len(bars) > 12 else ''})"


def _updates(updates: Summary) -> str:
    shares = [updates["conflicting"] / updates["made"], updates["conflicting_rows"] / max(1, updates["rows"])]
    return (
        f"{updates['made']:,}, {updates['per_second']:,.0f} a second; {format_percent(shares[0])} of them "
        f"wrote what others had written since, {format_percent(shares[1])} of all rows"
    )


def _load(load: Summary) -> str:
    rows = f"; rows of each device: {', '.join(map(str, load['rows']))}" if load["rows"] else ""
    longer = f"{format_percent(load['imbalance'])} of the mean longer than the quickest"
    return f"the slowest rank works {longer}{rows}"


def _used(axis: Summary) -> str:
    hidden = "" if axis["hidden"] is None else f", {format_percent(axis['hidden'])} hidden"
    return f"{format_bytes(axis['bytes'])} a step, {axis['seconds']:.3g} s on the wire{hidden}"


def _choices(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary["layout"]:
        yield "layout", _layout(summary["layout"])
    if summary["parameters"]:
        yield "model", f"{format_count(summary['parameters'])} parameters"
    for name in ("precision", "device"):
        if summary[name]:
            yield name, str(summary[name])


def _progress(summary: Summary) -> str:
    planned = summary["planned_steps"]
    of = f" of {planned:,}" if planned and planned != summary["steps"] else ""
    unit = "tokens" if summary["tokens_per_second"]["median"] is not None else "samples"
    return (
        f"{summary['steps']:,}{of} in {format_duration(summary['seconds'])}, "
        f"{format_count(summary['tokens'])} {unit}"
    )


def _samples(summary: Summary) -> str:
    samples = summary["sequences_per_second"]
    return "" if samples is None else f", {format_count(samples)} samples/s"


def _mfu(summary: Summary) -> str:
    if summary["mfu"] is None:
        return "n/a: this device's peak is not known"
    convention = summary["flop_convention"]
    return format_percent(summary["mfu"]) + (f" ({convention})" if convention else "")


def _memory(summary: Summary) -> str:
    if summary["peak_memory_bytes"] is None:
        return "n/a"
    planned = summary["predicted_states_gib"]
    states = None if planned is None else f"of it {format_bytes(planned * GIB)} of model states, as planned"
    notes = [summary["memory_kind"], states]
    remark = "; ".join(note for note in notes if note)
    return format_bytes(summary["peak_memory_bytes"]) + (f" ({remark})" if remark else "")


def _layout(layout: Mapping[str, object]) -> str:
    """Return the degrees above one and the choices that are on, which distinguish this layout from one
    device.
    """
    several = any(layout.get(axis) not in (None, 1, -1) for axis in AXES)
    parts = [f"{name} {value}" for name, value in layout.items() if _is_worth_showing(name, value, several)]
    return ", ".join(parts) or "one device"


def _is_worth_showing(name: str, value: object, several: bool) -> bool:
    if name == "zero":
        return several and value is not None
    if name in Layout.model_fields and value == Layout.model_fields[name].default:
        return False
    return bool(value) if isinstance(value, bool) else value not in (None, 1, -1)


def _checkpoints(checkpoints: Summary) -> str:
    kept = checkpoints["kept_steps"]
    names = "not known" if kept is None else ", ".join(f"step {step}" for step in kept) or "none"
    took = checkpoints["save_seconds"]
    typical = ""
    if took is not None:
        stall = f"training stood still {checkpoints['stall_seconds']:.3g} s"
        typical = f" (in {took:.3g} s each, of which {stall})"
    return f"{checkpoints['saved']} saved{typical}; kept: {names}"


def _advice(advice: Summary) -> str:
    every = f"every {advice['every_steps']:,} steps ({format_duration(advice['every_seconds'])})"
    return f"{every} loses least, at one failure in {advice['mtbf_hours']:,.0f} hours: {advice['basis']}"


def _curve(summary: Summary, console: Console) -> None:
    marks = [(point["step"], point["loss"]) for point in summary["held_out"]]
    width = max(20, min(60, console.width - 14))
    ascii_only = console.options.ascii_only
    lines = line_plot([(step, loss) for step, loss in summary["curve"]], marks, width, ascii_only=ascii_only)
    if not lines:
        return
    key = f"{'o' if ascii_only else '●'} held-out" if marks else ""
    _heading(console, "loss by step", key)
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"[⠀-⣿*]+", "green")
        text.highlight_regex(r"●", "bold yellow")
        _print_indented(text, console)


def _time(summary: Summary, console: Console) -> None:
    step = summary["time"]["seconds_a_step"]
    _heading(console, "where a step's time goes", f"{step:.3g} s a step")
    grid = _grid(_TIME_COLUMNS)
    for name, part in summary["time"]["shares"].items():
        drawn = _bar(part, console, _COLOURS[name])
        grid.add_row(Text(_LABELS.get(name, name)), Text(format_percent(part)), drawn)
    _print_indented(grid, console)


def _goodput(goodput: Summary, console: Console) -> None:
    """Draw one bar for the whole time, split into its parts, and a legend."""
    if goodput["share"] is None:
        return
    wall = goodput["wall_seconds"]
    parts = {name: seconds for name, seconds in goodput["parts"].items() if seconds > 0}
    _heading(console, "goodput", f"{format_percent(goodput['share'])} of {format_duration(wall)}")
    width = min(2 * _BAR, max(10, console.width - 4))
    plain = console.options.ascii_only or console.color_system is None or console.no_color
    drawn = Text()
    for name, cells in _cells(parts, width).items():
        _, colour, letter = _PARTS[name]
        drawn.append((letter if plain else "█") * cells, style=colour)
    _print_indented(drawn, console)
    grid = _grid(_PART_COLUMNS)
    for name, seconds in parts.items():
        label, colour, letter = _PARTS[name]
        sign = Text(letter if plain else "█", style=colour)
        grid.add_row(sign, Text(label), Text(format_percent(seconds / wall)), Text(_seconds(seconds)))
    _print_indented(grid, console)


def _cells(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """Return the number of characters of each part, so that they fill the width.

    Rounding up begins with the largest remainders.
    """
    whole = sum(parts.values())
    exact = {name: seconds / whole * width for name, seconds in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: cells[name] - exact[name])[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def _faults(goodput: Summary, console: Console) -> None:
    """Print the faults and how the run recovered from them, then the slow ranks."""
    faults, recoveries = goodput["faults"], goodput["recoveries"]
    if faults:
        _heading(console, "faults", f"the last {_FAULTS} of {len(faults)}" if len(faults) > _FAULTS else "")
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
        for name, justify in _FAULT_COLUMNS.items():
            table.add_column(name, justify=justify, no_wrap=name != "cause", overflow=_CROP)
        for fault in faults[-_FAULTS:]:
            recovery = None if fault["recovery"] is None else recoveries[fault["recovery"]]
            table.add_row(*_fault(fault, recovery))
        _print_indented(table, console)
    if goodput["stragglers"]:
        _heading(console, "slow ranks", "times the median of the ranks that do the same work")
        for slow in goodput["stragglers"]:
            until = "the end" if slow["until_step"] is None else f"step {slow['until_step']}"
            subject = "all ranks wait" if slow["rank"] is None else f"rank {slow['rank']}"
            steps = f"{subject}, step {slow['step']} to {until}"
            line = f"{steps}: {slow['factor']:.1f} times as long; {slow['cause']}"
            _print_indented(Text(line, overflow=_CROP), console)


def _fault(fault: Summary, recovery: Summary | None) -> list[Text]:
    rank = "" if fault.get("rank") is None else f"rank {fault['rank']}"
    cells = [f"{fault.get('step', '')}", f"{fault.get('kind', '')}", rank]
    if recovery is None:
        cells += ["not", "", ""]
    else:
        cells += [
            f"in {_seconds(recovery['seconds'])}",
            f"{recovery.get('lost_steps', '')}",
            f"step {recovery.get('step', '')}",
        ]
    return [Text(cell) for cell in (*cells, str(fault.get("cause", "")).partition("\n")[0])]


def _seconds(value: float) -> str:
    """Return a short time with a tenth of a second, and a long one as on a clock."""
    return f"{value:.1f} s" if value < 60 else format_duration(value)


def _fit(float8: Summary) -> str:
    """Return a line about how well tensors fit into 8 bits, with a warning if they do not."""
    layer, worst = max(float8["layers"].items(), key=lambda item: item[1]["most_lost"])
    text = f"at most {format_percent(worst['most_lost'])} of a tensor lost below the range ({layer}); "
    text += f"{counted(float8['made_again'], 'step')} made again because a tensor had outgrown its scale"
    if worst["most_lost"] > _LOST:
        text += f". WARNING: leave {layer} out of float8 (train.float8_leave_out)"
    return text


def _float8(float8: Summary | None, console: Console) -> None:
    """Draw a bar for each layer, or for those that lose most."""
    if not float8:
        return
    layers = sorted(float8["layers"].items(), key=lambda item: -item[1]["lost"])[:_EXPERTS]
    left_out = len(float8["layers"]) - len(layers)
    note = "numbers below the range, last step, worst tensor of each layer"
    note += f"; the {len(layers)} worst" if left_out else ""
    _heading(console, "lost in float8", note)
    most = max(1e-9, *(layer["lost"] for _, layer in layers))
    grid = _grid(_EXPERT_COLUMNS)
    for name, layer in layers:
        drawn = _bar(layer["lost"] / most, console, "magenta")
        grid.add_row(Text(name), Text(f"{layer['lost']:.2%}"), drawn)
    _print_indented(grid, console)


def _experts(experts: Summary | None, console: Console) -> None:
    """Draw a bar for each expert; if there are many, for the busiest and the idlest."""
    if not experts:
        return
    load = list(enumerate(experts["load"]))
    shown, note = load, "last step, all layers; 1 is even"
    if len(load) > _EXPERTS:
        ranked = sorted(load, key=lambda expert: -expert[1])
        shown = ranked[: _EXPERTS // 2] + ranked[-_EXPERTS // 2 :]
        note += f"; the busiest and the idlest {_EXPERTS // 2} of {len(load)}"
    _heading(console, "load of each expert", note)
    most = max(1.0, *experts["load"])
    grid = _grid(_EXPERT_COLUMNS)
    for index, tokens in shown:
        grid.add_row(Text(str(index)), Text(f"{tokens:.2f}"), _bar(tokens / most, console, "magenta"))
    _print_indented(grid, console)


def _collectives(collectives: Summary, console: Console) -> None:
    if not collectives:
        return
    _heading(console, "collectives", "bytes of the full tensor")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for name in ("kind", "axis"):
        table.add_column(name, overflow=_CROP)
    for name in ("a step", "bytes a step", "in all", "bytes in all"):
        table.add_column(name, justify="right", overflow=_CROP)
    for key, row in collectives.items():
        kind, _, axis = key.partition("/")
        counts = (
            f"{row['count']:g}",
            format_bytes(row["bytes"]),
            f"{row['total_count']:,}",
            format_bytes(row["total_bytes"]),
        )
        table.add_row(*map(Text, (kind.replace("_", " "), axis, *counts)))
    _print_indented(table, console)


def _grid(columns: tuple[JustifyMethod, ...]) -> Table:
    """Return a table without lines, with columns that are not wrapped."""
    grid = Table.grid(padding=(0, 2))
    for justify in columns:
        grid.add_column(justify=justify, no_wrap=True, overflow=_CROP)
    return grid


def _bar(fraction: float, console: Console, colour: str) -> Text:
    """Return a bar of at most `_BAR` characters, with room for two columns before it."""
    width = min(_BAR, max(10, console.width - 40))
    return Text(bar(fraction, width, console.options.ascii_only), style=colour)


def _print_indented(content: RenderableType, console: Console) -> None:
    console.print(Padding(content, (0, 0, 0, 2), expand=False))


def _heading(console: Console, title: str, note: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, "bold"), ("   " + note if note else "", "dim")))


def _loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _amount(value: float | None) -> str:
    return "n/a" if value is None else format_count(value)
