"""Errors of the planner on measured runs: `python benchmarks/planner_accuracy.py FILE…` prints JSON.

    python benchmarks/planner_accuracy.py runs.csv sweep.csv [--rows rows.csv] [--only WORDS]

This command fits nothing. Every device and cluster has the constants of shardwise/cost/clusters.py, every
program those of planner_programs.py; none belongs to a model or a row. Some published runs were used to
choose these constants, so the errors on those runs do not say how large errors on others are:
benchmarks/RESULTS.md says which runs they are. `constant` is a baseline that is fitted to the answers: the
one number of TFLOP/s per device that fits the rows of a group best. `skill` is the share of its error that
the planner avoids.

Prints for each file the number of rows, how many are modelled, and why others are not; for each group and set
of groups the error of the step time; predicted and measured memory; `conservation`: whether FLOP/s follow
from tokens/s by the source's own count, and parameter counts from shapes; and for sweeps, how much slower the
planner's first choice, or the best of its first five, is than the best measured layout.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner_cases import Case, read_cases
from planner_judge import Judged, judge
from planner_published import published_flops

from shardwise.config.parameters import count
from shardwise.cost.clusters import CLUSTERS
from shardwise.errors import UserError
from shardwise.units import GIB

# -- step time -----------------------------------------------------------------------------------------------


def time_figures(group: Sequence[Judged]) -> dict[str, Any]:
    """Errors of the step time, and of the best constant."""
    timed = [one for one in group if one.case.seconds is not None]
    if not timed:
        return {"rows": len(group), "timed": 0}
    errors = [one.error for one in timed]
    constant, constant_error = best_constant(timed, [one.flops for one in timed])
    _, whole_error = best_constant(timed, [one.flops_of_whole_attention for one in timed])
    mean = fmean(map(abs, errors))
    return {
        "rows": len(group),
        "timed": len(timed),
        "assumed": sum(bool(one.case.assumed) for one in timed),
        "mean_error": mean,
        "median_error": median(map(abs, errors)),
        "bias": fmean(errors),
        "worst": max(errors, key=abs),
        "constant_tflops": constant / 1e12,
        "constant_error": constant_error,
        "skill": 1 - mean / constant_error if constant_error > 0 else None,
        "constant_error_whole_attention": whole_error,
        "skill_whole_attention": 1 - mean / whole_error if whole_error > 0 else None,
    }


def best_constant(timed: Sequence[Judged], flops: Sequence[float]) -> tuple[float, float]:
    """FLOP/s for which the mean error is smallest, and that error: |rate / constant - 1| summed is smallest
    where 1 / constant is the median of 1 / rate, each weighing `rate`."""
    rates = sorted(
        (each / (one.case.seconds or 1.0) for one, each in zip(timed, flops, strict=True)), reverse=True
    )
    half, weight = sum(rates) / 2, 0.0
    for rate in rates:
        weight += rate
        if weight >= half:
            break
    return rate, fmean(abs(each / rate - 1) for each in rates)


def groups_of(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """By file, program, device, precision and kind of model."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        case = one.case
        groups[
            f"{Path(case.file).with_suffix('')}: {case.program} {case.device} {case.work.precision} "
            f"{case.family}"
        ].append(one)
    return groups


SETS: dict[str, Callable[[Case], bool]] = {
    "llm-foundry h100": lambda case: case.stack == "llm-foundry" and case.device.startswith("h100"),
    "llm-foundry a100": lambda case: case.stack == "llm-foundry" and case.device.startswith("a100"),
    "llm-foundry a100-40": lambda case: case.stack == "llm-foundry" and case.device == "a100-40",
    "llm-foundry a100-80": lambda case: case.stack == "llm-foundry" and case.device == "a100-80",
    "vtrain": lambda case: case.stack == "vtrain",
    "megatron-bridge dense pre-training": lambda case: (
        "bridge" in case.program.lower() and case.family == "dense"
    ),
    "megatron-bridge moe pre-training": lambda case: (
        "bridge" in case.program.lower() and case.family == "moe"
    ),
    "torchtitan": lambda case: case.stack == "torchtitan",
    "nanotron": lambda case: case.stack == "nanotron",
    "all dense": lambda case: case.family == "dense",
    "all moe": lambda case: case.family == "moe",
    "all with nothing assumed": lambda case: not case.assumed,
}


# -- memory --------------------------------------------------------------------------------------------------


def memory_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Errors of the peak by how it was measured, layouts said to fit that did not, and runs said not to fit
    that ran."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.case.memory:
            groups[
                f"{Path(one.case.file).with_suffix('')}: {one.case.program} {one.case.memory_kind}"
            ].append(one)
    status = {
        name: [one for one in judged if one.case.status == name] for name in ("ok", "out_of_memory", "failed")
    }
    ran = [one for one in status["ok"] if one.case.memory_kind != "theory"]
    return {
        "groups": {name: _memory_errors(group) for name, group in groups.items()},
        "out_of_memory": len(status["out_of_memory"]),
        "said_to_fit_but_out_of_memory": [one.case.name for one in status["out_of_memory"] if one.fits],
        "failed_without_a_reason": len(status["failed"]),
        "said_to_fit_but_failed_without_a_reason": sum(one.fits for one in status["failed"]),
        "ran": len(ran),
        "ran_but_said_not_to_fit": sum(not one.fits for one in ran),
        "ran_but_said_not_to_fit_by_program": dict(Counter(one.case.program for one in ran if not one.fits)),
    }


def _memory_errors(group: Sequence[Judged]) -> dict[str, Any]:
    errors = [one.measurable / (one.case.memory or 1.0) - 1 for one in group]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(group),
        "median_error": median(sizes),
        "mean_error": fmean(sizes),
        "bias": fmean(errors),
    }


# -- conservation --------------------------------------------------------------------------------------------


def conservation(cases: Sequence[Case]) -> dict[str, Any]:
    """Published FLOP/s against tokens/s times the source's own FLOPs a token; published parameters against
    our count. `rounding` is the part of a difference that the printed digits explain."""
    flops: dict[str, list[tuple[float, float]]] = defaultdict(list)
    parameters: dict[str, list[bool]] = defaultdict(list)
    wrong: set[str] = set()
    for case in cases:
        if (pair := _flop_difference(case)) is not None:
            flops[f"{case.program} ({case.convention})"].append(pair)
        if "parameters" in case.published:
            same = _same_parameters(case)
            parameters[case.program].append(same)
            if not same:
                wrong.add(
                    f"{case.model}: {case.printed['parameters']} B printed, "
                    f"{count(case.work.model) / 1e9:.3f} counted"
                )
    return {
        "flops": {
            name: {
                "rows": len(pairs),
                "median_difference": median(pair[0] for pair in pairs),
                "largest_difference": max(pair[0] for pair in pairs),
                "largest_beyond_rounding": max(max(0.0, pair[0] - pair[1]) for pair in pairs),
                "rows_off_by_half_a_percent": sum(pair[0] - pair[1] > 0.005 for pair in pairs),
            }
            for name, pairs in flops.items()
        },
        "parameters": {name: {"rows": len(same), "exact": sum(same)} for name, same in parameters.items()},
        "parameters_that_differ": sorted(wrong),
    }


def _flop_difference(case: Case) -> tuple[float, float] | None:
    """Relative difference to FLOP/s or MFU, whichever is printed with more digits, and how much of it
    rounding may explain."""
    if "tokens" not in case.published or case.convention is None:
        return None
    peaks = CLUSTERS[case.device].device.peak if case.device in CLUSTERS else {}
    scales = {"flops": 1.0, "mfu": peaks.get(case.work.precision)}
    known = [key for key, scale in scales.items() if key in case.published and scale]
    if not known:
        return None
    key = min(known, key=lambda key: half_digit(case.printed[key]))
    ours = case.published["tokens"] * published_flops(
        case.work.model, case.work.sequence_length, case.convention
    )
    difference = abs(ours / (case.published[key] * (scales[key] or 1.0)) - 1)
    sequences = case.published["tokens"] * case.devices / case.work.sequence_length
    whole = abs(sequences - round(sequences)) < 1e-6  # printed as whole sequences a second of all devices
    return difference, half_digit(case.printed[key]) + (
        0.5 / sequences if whole else half_digit(case.printed["tokens"])
    )


def half_digit(text: str) -> float:
    """Half a unit of the last printed digit, relative to the number."""
    decimals = text.rstrip("0").partition(".")[2] if "." in text else ""
    return 0.5 * 10.0 ** -len(decimals) / float(text)


def _same_parameters(case: Case) -> bool:
    text, models = case.printed["parameters"], [case.work.model]
    if case.stack == "nanotron":  # its label is that of one variant
        models.append(models[0].model_copy(update={"tied": not models[0].tied}))
    half = half_digit(text) * float(text) * 1.000001
    return any(abs(count(model) / 1e9 - float(text)) <= half for model in models)


# -- sweeps --------------------------------------------------------------------------------------------------


def sweep_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """What following the planner loses, for all layouts and for those most people would try."""
    sweep = [one for one in judged if one.case.sweep]
    small = [one for one in sweep if one.case.layout["tensor"] <= 8 and one.case.devices <= 16 * 8]
    return {
        name: _regrets(rows)
        for name, rows in (("tensor <= 8 and nodes <= 16", small), ("all", sweep))
        if rows
    }


def _regrets(rows: Sequence[Judged]) -> dict[str, Any]:
    jobs: dict[str, list[Judged]] = defaultdict(list)
    for one in rows:
        case = one.case
        variant = "tied" if case.work.model.tied else "untied"
        where = "" if case.device == "h100-hf" else f"{case.program} {case.device}: "
        jobs[f"{where}{case.model} {variant}, {case.devices} devices, batch {case.work.global_batch}"].append(
            one
        )
    groups = {
        name: _regret(group)
        for name, group in sorted(jobs.items())
        if sum(one.case.seconds is not None for one in group) > 1
    }
    figures = ("first", "best_of_five", "first_said_to_fit", "best_of_five_said_to_fit")
    summary: dict[str, Any] = {"groups": len(groups)}
    for name in figures:
        values = [group[name] for group in groups.values() if group[name] is not None]
        summary[name] = {"mean": fmean(values), "worst": max(values)} if values else None
    summary["first_choice_failed"] = sum(group["first_choice_failed"] for group in groups.values())
    return {**summary, "each": groups}


def _regret(group: Sequence[Judged]) -> dict[str, Any]:
    """Among the layouts that ran, and among those of them that the planner says fit. `first_choice_failed`:
    whether the layout it would have named, failed ones included, is one that failed."""
    ran = sorted((one for one in group if one.case.seconds is not None), key=lambda one: one.seconds)
    fitting = [one for one in ran if one.fits]
    named = min((one for one in group if one.fits), key=lambda one: one.seconds, default=None)
    best = min(one.case.seconds or 0.0 for one in ran)

    def lost(chosen: Sequence[Judged]) -> float | None:
        return 1 - best / min(one.case.seconds or 0.0 for one in chosen) if chosen else None

    return {
        "ran": len(ran),
        "failed": sum(one.case.status == "failed" for one in group),
        "first": lost(ran[:1]),
        "best_of_five": lost(ran[:5]),
        "first_said_to_fit": lost(fitting[:1]),
        "best_of_five_said_to_fit": lost(fitting[:5]),
        "first_choice_failed": named is not None and named.case.status == "failed",
    }


# -- the command ---------------------------------------------------------------------------------------------


def report(files: Sequence[Path], only: str = "") -> tuple[dict[str, Any], list[Judged]]:
    """Everything that is printed, and the rows behind it. A file that cannot be read has its reason there."""
    result: dict[str, Any] = {"files": {}}
    everything: list[Judged] = []
    names = Counter(path.name for path in dict.fromkeys(files))
    for path in dict.fromkeys(files):
        label = path.name if names[path.name] == 1 else str(path)
        try:
            result["files"][label], judged = _report_file(path, label)
            everything += judged
        except UserError as error:
            print(error, file=sys.stderr)
            result["files"][label] = {"error": str(error)}
    groups = {name: group for name, group in groups_of(everything).items() if only in name}
    kept = [one for group in groups.values() for one in group]
    sets = {name: [one for one in kept if chosen(one.case)] for name, chosen in SETS.items()}
    result["sets"] = {name: time_figures(group) for name, group in sets.items() if group}
    result["groups"] = {name: time_figures(group) for name, group in groups.items()}
    result["memory"] = memory_figures(kept)
    result["conservation"] = conservation([one.case for one in kept])
    result["sweep"] = sweep_figures(kept)
    return result, kept


def _report_file(path: Path, label: str) -> tuple[dict[str, Any], list[Judged]]:
    cases, refused = read_cases(path, label)
    judged, without = judge(cases)
    rows = len(cases) + sum(refused.values())
    print(f"{label}: {len(judged)} of {rows} rows modelled", file=sys.stderr)
    assumed = Counter(rule for one in judged for rule in one.case.assumed)
    figures = {
        "rows": rows,
        "modelled": len(judged),
        "not_modelled": dict(Counter(refused) + without),
        "assumed": dict(assumed),
    }
    return figures, judged


def write_rows(path: Path, judged: Sequence[Judged]) -> None:
    """Every row with what was measured and what was predicted."""
    rows = [_written(one) for one in judged]
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def _written(one: Judged) -> dict[str, Any]:
    case, work = one.case, one.case.work
    return {"file": case.file, "name": case.name, "program": case.program,
    "traits": " ".join(sorted(case.traits)),
            "model": case.model, "device": case.device, "devices": case.devices,
            "sequence": work.sequence_length,
            "batch": work.global_batch, "precision": work.precision, **case.layout, "status": case.status,
            "measured_s": case.seconds, "predicted_s": one.seconds,
            "error": one.error if case.seconds else "",
            "measured_gib": case.memory / GIB if case.memory else "", "memory_kind": case.memory_kind,
            "predicted_gib": one.measurable / GIB, "peak_gib": one.peak / GIB, "fits": one.fits,
            **{f"s_{name}": value for name, value in one.terms.items()},
            **{f"gib_{name}": value / GIB for name, value in one.memory.items()},
            "assumed": "; ".join(case.assumed)}  # fmt: skip


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="the planner held against measured runs")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a CSV of measured runs")
    parser.add_argument("--rows", type=Path, help="write every row, with its terms, to this CSV file")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="only groups whose name contains these words"
    )
    asked = parser.parse_args()
    try:
        if asked.rows:
            _check_writable(asked.rows, asked.files)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    result, judged = report(asked.files, asked.only)
    wrong = sum("error" in figures for figures in result["files"].values())
    if wrong < len(result["files"]):
        if asked.rows:
            write_rows(asked.rows, judged)
        print(json.dumps(_rounded(result), indent=1))
    sys.exit(2 if wrong else 0)


def _check_writable(path: Path, files: Sequence[Path]) -> None:
    """Before all the work, not after it."""
    if path.resolve() in [file.resolve() for file in files]:
        raise UserError(f"--rows {path}: would overwrite a file that is to be read")
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--rows {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    main()
