"""Drawings of schedules: readable in a terminal, valid as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.config.schedules import SCHEDULES
from shardwise.library.draw_schedule import COLOURS, draw_svg, draw_text, summary
from shardwise.plans import make_schedule, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_text_has_a_row_a_rank_a_cell_a_unit_and_dots_where_a_rank_waits() -> None:
    assert draw_text(simulate(make_schedule("1f1b", 2, 2))).splitlines() == [
        "rank 0  F0 F1 .. .. B0--- .. B1---",
        "rank 1  .. F0 B0--- F1 B1--- .. ..",
    ]


def test_a_rank_with_several_stages_names_them() -> None:
    assert draw_text(simulate(make_schedule("zbv", 1, 1))) == "rank 0  0F0 1F0 1I0 1W0 0B0----"


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_fits_120_columns_and_says_when_it_is_clipped(name: str) -> None:
    lines = draw_text(simulate(make_schedule(name, 4, 40))).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) == 5
    assert "units of time" in lines[-1]


def test_the_summary_has_the_bubble_and_the_activations() -> None:
    assert summary(simulate(make_schedule("1f1b", 4, 8))) == (
        "1f1b: 4 ranks, 4 stages, 8 micro-batches; bubble 27.3%, at most 4 activations on a rank"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_well_formed_and_has_a_box_for_every_action_that_overlaps_no_other(name: str) -> None:
    timeline = simulate(make_schedule(name, 3, 5), 1.0, 1.5, 0.7)
    picture = ElementTree.fromstring(draw_svg(timeline))
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in picture.iter(f"{SVG}rect"):
        if box.find(f"{SVG}title") is not None:
            assert box.get("fill") in COLOURS.values()
            rows.setdefault(str(box.get("y")), []).append(
                (float(box.get("x", 0)), float(box.get("width", 0)))
            )
    assert [len(row) for row in rows.values()] == [len(row) for row in timeline.schedule.actions]
    for row in rows.values():
        assert all(left + width <= after + 0.2 for (left, width), (after, _) in pairwise(row))
        assert all(left >= 0 and left + width <= float(picture.get("width", 0)) for left, width in row)
    words = "".join(picture.itertext())
    assert f"bubble {timeline.bubble:.1%}" in words
    assert "rank 2" in words
    assert "peak activations by rank" in words


def test_svg_links_to_nothing_outside() -> None:
    assert draw_svg(simulate(make_schedule("zb1p", 2, 2))).count("http") == 1  # the name space


def test_the_picture_in_the_documentation_is_the_one_we_draw() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "schedule-zbv.svg").read_text()
    assert committed == draw_svg(simulate(make_schedule("zbv", 4, 8)))
