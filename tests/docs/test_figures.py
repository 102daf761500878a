"""Measured figures in the documentation are those of benchmarks/RESULTS.md, digit for digit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(
    ROOT / "docs" / "configuration.md"
)  # made from the definitions of the settings; it has no measurements

NUMBER = r"(?<![\w.,/-])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d.]*\d)"
UNITS = ["tokens/s", "GiB", "MiB", "GB", "%", "times", "seconds", "minutes", "ms", "s", "layouts"]
SHORT = {"seconds": "s"}
UNIT = "|".join(rf"{re.escape(unit)}(?!\w)" for unit in UNITS)
QUANTITY = re.compile(rf"({NUMBER}(?: to {NUMBER})?)(?: and ({NUMBER}))?\s?(?:CPU )?({UNIT})")
COUNT = r"(?:an?|one|two|three|four|five|ten|few|a few|some|half an?|a quarter of an?)"
IN_WORDS = re.compile(
    rf"\b(?:twice|half|{COUNT} times) as (?:fast|quick)\b"
    rf"|\b(?:takes?|in|about) (?:{COUNT} )?(?:to {COUNT} )?(?:second|minute)s?\b"
)
NOT_MEASURED = {
    "a setting, a limit or a version of something": {
        "README.md": ["3.11"],
        "asynchronous.md": ["20 times", "20 s"],
        "checkpoints.md": ["1 GB"],
        "compression.md": ["1 %", "1 times", "0.999", "0.95"],
        "dependencies.md": ["4 MiB", "3.12", "2.11", "2.14"],
        "design.md": ["1 %", "-0.0"],
        "planner.md": ["8 %", "2 %", "12.5"],
        "precision.md": ["8 times", "57,344"],
        "recovery.md": ["5 minutes", "15 minutes", "15 s", "10 s", "90 s", "30 s", "4 to 8 MiB", "16 MiB"],
        "training.md": ["15 minutes"],
        "verify.md": ["8 times", "1 %"],
    },
    "in RESULTS.md too, and known in one digit only": {
        "compression.md": ["7 %", "6 %"],
        "design.md": ["7 %"],
    },
    "what others advise, not a measurement of ours": {"optimizers.md": ["3 to 10 times"]},
    "follows from a formula (of schedules: tests/plans/test_schedule_timeline.py)": {
        "asynchronous.md": ["2.5"],
        "pipelines.md": ["27.3 %", "15.8 %", "11.1 %", "5.9 %", "29.1 %", "34.9 %", "5.5"],
    },
}
PREDICTED = re.compile(r"## Eight large runs\n.*?(?=\n## |\Z)", re.DOTALL)
"""Predictions for runs of others, beside what these published (`benchmarks/planner_large_runs.py`)."""


def prose(markdown: str) -> str:
    """The text without code, whose numbers are settings or output."""
    return re.sub(r"(?s:```.*?```)|`[^`]*`|^ {4}\S.*$", "`", PREDICTED.sub("", markdown), flags=re.MULTILINE)


def quantities(text: str) -> Iterator[tuple[str, str]]:
    """Each number that has a unit, with it; a range such as "2 to 5" is one number."""
    for match in QUANTITY.finditer(text):
        first, second, unit = match.groups()
        for number in filter(None, (first, second)):
            yield number.replace("+", ""), SHORT.get(unit, unit)


def numbers(text: str) -> set[str]:
    return {number.replace("+", "") for number in re.findall(NUMBER, text)}


def of_tables(markdown: str) -> Iterator[tuple[str, str]]:
    """Each number in a table with the units that its cell, the head of its column or the head of its row
    names."""
    for table in re.findall(r"(?:^ *\|.*\n)+", markdown, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()
        )
        for row in rows:
            for column, cell in zip(head, row, strict=False):
                named = f"{row[0]} {column}".replace("ratio", "times")
                for unit in re.findall(rf"(?<!\w)(?:{UNIT})", named):
                    yield from ((number, SHORT.get(unit, unit)) for number in numbers(cell))


SECTIONS = [
    ({*quantities(text), *of_tables(text)}, numbers(text))
    for text in re.split(r"^## ", RESULTS, flags=re.MULTILINE)
]
SIDE_BY_SIDE = next(
    {*of_tables(text)}
    for text in re.split(r"^## ", RESULTS, flags=re.MULTILINE)
    if text.startswith("Side by side")
)


def told_apart(figure: str) -> bool:
    """Whether a figure has enough digits to be found in RESULTS.md by more than chance: "6 %" has not."""
    return not figure.endswith("%") or len(re.sub(r"\D", "", figure)) > 1


def figures(text: str) -> set[str]:
    """Quantities with their unit, and other numbers that are written with a point or a comma."""
    with_unit = {*quantities(text)}
    bare = numbers(text) - {number for number, _ in with_unit}
    return {f"{number} {unit}" for number, unit in with_unit} | {
        number for number in bare if re.search("[.,]", number)
    }


def not_in_results(text: str, excepted: list[str]) -> list[set[str]]:
    """Of each sentence and table cell, the figures that no section of RESULTS.md has, or that none has all
    together."""
    sections = [{*(f"{number} {unit}" for number, unit in measured), *plain} for measured, plain in SECTIONS]
    statements = (figures(sentence) - {*excepted} for sentence in re.split(r"(?<=[.:])\s+|\n\s*\n|\|", text))
    return [
        said
        for said in statements
        if not (all(map(told_apart, said)) and any(said <= section for section in sections))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_figure_of_a_page_is_in_the_results(page: Path) -> None:
    excepted = [figure for pages in NOT_MEASURED.values() for figure in pages.get(page.name, [])]
    assert not_in_results(prose(page.read_text()), excepted) == [], (
        "quote benchmarks/RESULTS.md, or say in NOT_MEASURED why this is no measurement"
    )


@pytest.mark.parametrize(
    "wrong",
    ["56,400 tokens/s", "73,386 GiB", "57 layouts", "2 to 5 %", "6 %", "35,900", "1.02 and 1.16 times"],
)
def test_a_figure_that_was_never_measured_is_found(wrong: str) -> None:
    assert not_in_results(f"It reaches {wrong} on one H200.", []) != []


def test_no_exception_outlives_what_it_was_for() -> None:
    for pages in NOT_MEASURED.values():
        for name, figures in pages.items():
            text = next(prose(page.read_text()) for page in PAGES if page.name == name)
            assert set(figures) <= {f"{number} {unit}" for number, unit in quantities(text)} | numbers(
                text
            ), name


def test_one_measurement_has_one_figure_on_all_pages() -> None:
    """A rate that is less than 2 % from one that was measured side by side is another reading of it: the
    pages quote that one."""
    rates = {
        float(number.replace(",", ""))
        for number, unit in SIDE_BY_SIDE
        if unit == "tokens/s" and "," in number
    }
    quoted = set[str]().union(*(numbers(prose(page.read_text())) for page in PAGES))
    measured = {number for section, _ in SECTIONS for number, unit in section if unit == "tokens/s"}
    for number in (float(number.replace(",", "")) for number in quoted & measured):
        assert number in rates or not any(0.98 < number / rate < 1.02 for rate in rates), number


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_speeds_and_times_are_in_digits(page: Path) -> None:
    """A figure in words ("takes a second", "twice as fast") would escape the comparison."""
    assert IN_WORDS.findall(prose(page.read_text())) == []
