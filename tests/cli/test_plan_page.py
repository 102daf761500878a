"""The planner's page: safe, bounded and whole as text; drawn without an error in a browser, where its filters
filter."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import RANK_AXES
from shardwise.library.plan_page import AXIS_COLOURS, CANDIDATES, MEMORY_COLOURS, TERM_COLOURS, render_page
from shardwise.plans import make_schedule, simulate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 72.0
SEQUENCES, LENGTH = 16, 8192
FIXED = {"attention": "auto", "offload": False, "stages_per_rank": None, "expert": 1, "replica": 1}


def candidate(
    pipeline: int, data: int, context: int, tensor: int, zero: int, micro_batch: int, recompute: str
) -> dict[str, Any]:
    """Numbers with the right shape and no claim to be right: more of an axis, less memory and more
    waiting."""
    accumulation = max(1, SEQUENCES // (data * micro_batch))
    memory = {
        "weights": 290.0 / (tensor * pipeline * (data if zero == 3 else 1)),
        "gradients": 580.0 / (tensor * pipeline * (data if zero >= 2 else 1)),
        "optimizer": 1740.0 / (tensor * pipeline * (data if zero >= 1 else 1)),
        "activations": {"none": 200.0, "selective": 100.0, "full": 20.0}[recompute]
        * micro_batch
        / (tensor * context),
        "logits": 3.9 * micro_batch / (tensor * context),
        "gathered": 3.2 / tensor if zero == 3 else 0.0,
        "buffers": 0.8,
        "overhead": 1.9,
    }
    compute = 1.9 * (1 + 0.004 * tensor)
    seconds = {
        "matmul": compute,
        "attention": 0.2,
        "elementwise": 0.16,
        "launch": 0.03 / micro_batch,
        "recompute": {"none": 0.0, "selective": 0.12, "full": 0.72}[recompute],
        "optimizer": 0.05,
        "bubble": compute * (pipeline - 1) / accumulation,
        "imbalance": 0.04 * (pipeline > 1),
        "tensor": 0.08 * (tensor - 1) ** 0.5,
        "context": 0.3 * (context - 1),
        "expert": 0.0,
        "data": (0.1 + (zero > 1) * (0.7 + 0.1 * zero * accumulation)) * (data > 1),
        "replica": 0.0,
        "pipeline_sends": 0.025 * (pipeline - 1),
        "offload": 0.0,
        "other": 0.03,
    }
    peak, total = sum(memory.values()), sum(seconds.values())
    axes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
    named = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    return {
        "layout": {**FIXED, **axes, "zero": zero, "schedule": "1f1b"},
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "schedule": "1f1b",
        "recompute": recompute,
        "memory_gib": {**memory, "total": peak},
        "step_seconds": {**seconds, "total": total},
        "tokens_per_second_per_device": SEQUENCES * LENGTH / total / 64,
        "mfu": 0.62 * compute / total,
        "bytes": [
            {"kind": "all_reduce", "axis": "tensor", "count": 2560, "bytes": 343_597_383_680},
            {"kind": "reduce_scatter", "axis": "data", "count": 80, "bytes": 8_804_682_956},
        ],
        "fits": peak <= LIMIT,
        "kind": f"{named}, zero {zero}",
    }


def candidates() -> list[dict[str, Any]]:
    """Every way to make 64 devices of four axes."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    layouts = [
        (p, 64 // (p * c * t), c, t)
        for p, c, t in product(sizes[:5], sizes[:3], sizes[:4])
        if p * c * t <= 64
    ]
    choices = product(layouts, (0, 1, 2, 3), (1, 2, 4), ("none", "selective", "full"))
    return [candidate(*layout, zero, batch, recompute) for layout, zero, batch, recompute in choices]


def placed(pipeline: int, data: int, tensor: int, devices_per_node: int = 8) -> list[dict[str, int]]:
    coordinates = product(range(pipeline), range(1), range(data), range(1), range(tensor))
    return [
        {"rank": rank, "node": rank // devices_per_node, **dict(zip(RANK_AXES, place, strict=True))}
        for rank, place in enumerate(coordinates)
    ]


def drawn_timeline(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    timeline = simulate(make_schedule(name, ranks, micro_batches), 0.094, 0.1, 0.088)
    rows = [
        [
            {
                "stage": s.action.stage,
                "kind": s.action.kind,
                "micro_batch": s.action.micro_batch,
                "start": s.start,
                "end": s.end,
            }
            for s in row
        ]
        for row in timeline.spans
    ]
    return {"rank_rows": rows, "makespan": timeline.makespan}


def answer(**changes: Any) -> dict[str, Any]:
    """As `shardwise plan --json` prints it, for 155B on 64 devices in 8 nodes."""
    every = candidates()
    best = {
        **candidate(4, 2, 1, 8, 1, 1, "selective"),
        "config": "[layout]\npipeline = 4\ndata = 2\ntensor = 8\nzero = 1\nschedule = "
        '"1f1b"\n\n[train]\nmicro_batch = 1\n'
        'recompute = "selective"\n',
        "reason": "The fastest of 112 layouts that fit: tensor stays inside a node; the pipeline crosses "
        "nodes with few bytes.",
        "memory_limit_gib": LIMIT,
        "timeline": drawn_timeline("1f1b", 4, 8),
        "map": placed(4, 2, 8),
        "links": [
            {"from": "inside", "axis": "tensor", "bytes": 343_597_383_680},
            {"from": "between", "axis": "data", "bytes": 8_804_682_956},
            {"from": "between", "axis": "pipeline", "bytes": 4_294_967_296},
        ],
    }
    runner_up = {
        **candidate(1, 16, 1, 4, 3, 1, "selective"),
        "loses_on": "It gathers the weights anew for every micro-batch: 1.2 s of exposed communication "
        "between nodes.",
    }
    whole = {
        "version": "0.1.0",
        "job": "jobs/dense-155b.toml",
        "cluster": {
            "name": "h100x64",
            "device": "H100 80GB",
            "devices": 64,
            "devices_per_node": 8,
            "nodes": 8,
            "memory_gib": 79.1,
            "margin": 0.09,
        },
        "model": {
            "parameters": 155_692_564_480,
            "active_parameters": 155_692_564_480,
            "flops_per_token": 4.4e11,
            "flop_convention": "matrix products and causal attention, backward twice forward, no "
            "recomputation",
        },
        "tokens_per_step": SEQUENCES * LENGTH,
        "best": best,
        "runner_up": runner_up,
        "binding": [
            "tensor = 16 is refused: the model has 8 kv heads, and a node 8 devices.",
            "pipeline is needed because weights, gradients and optimizer states of 155B take 2,600 GiB in "
            "each replica.",
        ],
        "advice": ['With 10 GiB more a device, recompute = "none" would fit and save 0.7 s a step.'],
        "candidates": every,
        "rejected": {
            "needs more memory than a device has": 412,
            "tensor does not divide 8 kv heads": 96,
            "80 blocks < stages": 3,
        },
        "considered": 2307,
        "seconds": 0.31,
    }
    return {**whole, **changes}


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="answer" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    value: dict[str, Any] = json.loads(found[1])
    return value


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_has_every_section_in_order() -> None:
    page = render_page(answer())
    assert "http://" not in page
    assert "https://" not in page
    assert "default-src 'none'" in page
    assert "@@" not in page
    assert not {"link", "img", "iframe"} & {tag for tag, _ in _Tags(page).tags}
    assert not [attributes for _, attributes in _Tags(page).tags if {"src", "href"} & set(attributes)]
    headings = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", page)
    assert headings == [
        "jobs/dense-155b.toml",
        "Config to paste",
        "Memory of the fullest rank",
        "Where the step's time goes",
        "Timeline of a step",
        "Ranks on nodes",
        "Bytes per link",
        "Candidates",
        "Refused layouts",
        "What binds",
        "Advice",
    ]


def test_what_is_read_stands_in_the_page_as_text() -> None:
    whole = answer()
    text = html.unescape(render_page(whole))
    for sentence in [
        *whole["binding"],
        *whole["advice"],
        *whole["rejected"],
        whole["best"]["reason"],
        whole["best"]["config"],
    ]:
        assert sentence in text
    assert f"{whole['best']['mfu']:.1%}" in text
    assert "64 x H100 80GB in 8 nodes of 8; 156B parameters; 131,072 tokens a step" in text
    assert whole["runner_up"]["loses_on"] in text


def test_a_hostile_name_stays_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&@@data ${1} \u2028"
    whole = answer(job=evil, binding=[evil], advice=[evil], rejected={evil: 3})
    whole["cluster"] = {**whole["cluster"], "name": evil, "device": evil}
    whole["best"] = {**whole["best"], "kind": evil, "config": evil, "reason": evil}
    whole["runner_up"] = {**whole["runner_up"], "kind": evil, "loses_on": evil}
    whole["candidates"] = [
        {**one, "kind": evil + str(place % 2)} for place, one in enumerate(whole["candidates"][:9])
    ]
    page = render_page(whole)
    assert [tag for tag, _ in _Tags(page).tags].count("script") == 2
    assert "img" not in {tag for tag, _ in _Tags(page).tags}
    assert embedded(page)["best"]["kind"] == evil
    assert embedded(page)["candidates"]["columns"]["kind"]["words"] == [evil + "0", evil + "1"]


def test_columns_give_the_candidates_back_best_first() -> None:
    whole = answer()
    expected = sorted(whole["candidates"], key=lambda one: (not one["fits"], one["step_seconds"]["total"]))
    packed = embedded(render_page(whole))["candidates"]
    assert packed["rows"] == len(expected)
    assert packed["columns"]["tensor"] == [one["layout"]["tensor"] for one in expected]
    assert packed["columns"]["expert"] == 1
    words = packed["columns"]["recompute"]
    assert [words["words"][place] for place in words["at"]] == [one["recompute"] for one in expected]
    totals = [one["memory_gib"]["total"] for one in expected]
    assert packed["columns"]["memory total"] == pytest.approx(totals, rel=1e-3)


def test_a_large_search_makes_a_page_of_bounded_size() -> None:
    every = (candidates() * 20)[: CANDIDATES + 500]
    page = render_page(answer(candidates=every))
    assert len(page) < 5_000_000
    assert embedded(page)["found"] == CANDIDATES + 500
    assert embedded(page)["candidates"]["rows"] == CANDIDATES


def test_a_page_of_the_best_layouts_says_how_many_there_are() -> None:
    drawn = embedded(render_page(answer(found=47_390)))
    assert drawn["found"] == 47_390
    assert drawn["candidates"]["rows"] == len(candidates())


def test_a_large_cluster_is_drawn_by_the_node_and_a_long_pipeline_by_some_of_its_ranks() -> None:
    whole = answer()
    whole["best"] = {**whole["best"], "map": placed(16, 32, 8), "timeline": drawn_timeline("1f1b", 16, 512)}
    drawn = embedded(render_page(whole))
    assert len(drawn["map"]["cells"]) == 16 * 32
    assert drawn["map"]["cells"][33] == [33, 33, 264, 271, [[1, 1], [0, 0], [1, 1], [0, 0], [0, 7]]]
    ranks = [row["rank"] for row in drawn["timeline"]["rows"]]
    assert ranks == [0, 5, 10, 15]
    assert drawn["timeline"]["ranks"] == 16


def test_a_number_without_an_end_does_not_break_the_page() -> None:
    whole = answer()
    whole["candidates"][3]["step_seconds"]["data"] = float("inf")
    assert "Infinity" not in json.dumps(embedded(render_page(whole)))


@pytest.mark.parametrize("colours", [AXIS_COLOURS, TERM_COLOURS, MEMORY_COLOURS])
def test_colours_stand_out_from_a_light_and_a_dark_page_and_from_each_other(colours: dict[str, str]) -> None:
    assert len(set(colours.values())) == len(colours)
    for colour in colours.values():
        assert _contrast(colour, "#fbfbf9") >= 2.9
        assert _contrast(colour, "#14181c") >= 2.9


def _contrast(one: str, other: str) -> float:
    """WCAG 2's ratio."""
    dark, light = sorted(_luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")


def run_chromium(page: str, folder: Path, *flags: str, place: str = "") -> str:
    """What the browser prints after it has opened the page at `place`, a `#…`, and run its scripts."""
    assert CHROMIUM
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    quiet = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    )
    command = [CHROMIUM, *quiet, "--virtual-time-budget=5000", *flags, file.as_uri() + place]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def opened(page: str, folder: Path, script: str = "", place: str = "") -> tuple[dict[str, str | None], Any]:
    """The attributes the page left on its root, and what a script of ours found (in `found`) after the page's
    own."""
    ours = f"<script>const found = {{}}; {script}; root.dataset.found = JSON.stringify(found)</script></body>"
    document = run_chromium(
        page.replace("</body>", ours), folder, "--dump-dom", "--window-size=1400,1000", place=place
    )
    attributes = next(attributes for tag, attributes in _Tags(document).tags if tag == "html")
    assert attributes.get("data-error") is None
    assert attributes.get("data-drawn") == "yes"
    return attributes, json.loads(str(attributes["data-found"]))


LOOK = """
const text = id => $(id).textContent;
const move = (target, x, y) =>
  target.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: x, clientY: y}));
found.segments = document.querySelector("#memory .bar").querySelectorAll("i[data-tip]").length;
const rows = [...document.querySelectorAll("#timeline .row")];
found.actions = rows.map(row => row.children.length);
found.numbers = rows[3].textContent;
found.cells = [...document.querySelectorAll("#map .node")].map(node => node.querySelectorAll("i").length);
found.links = text("links");
move(document.querySelector("#memory .bar i"), 10, 10); found.segment = text("tip");
const box = $("plot").getBoundingClientRect();
const at = {clientX: box.left + placed[0][0], clientY: box.top + placed[0][1], bubbles: true};
move($("plot"), at.clientX, at.clientY); found.dot = text("tip");
$("plot").dispatchEvent(new MouseEvent("click", at));
found.pinned = text("pinned");
found.hash = location.hash;
const pixels = $("plot").getContext("2d").getImageData(0, 0, $("plot").width, $("plot").height).data;
found.colours = new Set(new Uint32Array(pixels.buffer)).size;
"""


@browser
def test_a_browser_draws_every_part_and_tells_about_what_is_pointed_at(tmp_path: Path) -> None:
    whole = answer()
    attributes, found = opened(render_page(whole), tmp_path, LOOK)
    assert attributes["data-shown"] == str(len(whole["candidates"]))
    assert found["segments"] == 7 + 1  # kinds of memory above zero, and the margin
    assert found["actions"] == [16, 16, 16, 16]
    assert found["numbers"] == "".join(f"{batch}{batch}" for batch in range(8))
    assert found["cells"] == [8] * 8
    assert "320" in found["links"]
    assert found["segment"].startswith("winner: weights\n")
    fastest = min(
        (one for one in whole["candidates"] if one["fits"]), key=lambda one: one["step_seconds"]["total"]
    )
    assert f"{fastest['step_seconds']['total']:.3f}" in found["dot"]
    assert f"{fastest['memory_gib']['total']:.1f}" in found["dot"]
    assert found["pinned"].startswith("Pinned: ")
    assert "pin=" in found["hash"]
    assert found["colours"] > 20


USE = """
const choose = (label, value) => {
  const labels = [...document.querySelectorAll("#filters label")];
  const select = labels.find(one => one.firstChild.textContent === label).querySelector("select");
  select.value = value; select.dispatchEvent(new Event("change"));
};
const press = key => $("plot").dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
found.first = root.dataset.shown;
choose("recompute", "full"); found.second = root.dataset.shown;
$("fits").click(); found.third = root.dataset.shown;
["ArrowRight", "ArrowRight", "Enter"].forEach(press); found.pin = state.pin === placed[1][2];
press("Escape"); found.free = state.pin === null && $("pinned").children.length === 0;
choose("recompute", "none"); choose("tensor", 1); found.none = [root.dataset.shown, $("table").textContent];
[...document.querySelectorAll("#filters button")].at(-1).click(); found.last = root.dataset.shown;
"""


@browser
def test_filters_leave_exactly_what_they_ask_for(tmp_path: Path) -> None:
    whole = answer()
    every = whole["candidates"]
    small = [one for one in every if one["layout"]["tensor"] <= 4 and one["layout"]["zero"] == 3]
    full = [one for one in small if one["recompute"] == "full"]
    fitting = [one for one in full if one["fits"]]
    assert len(every) > len(small) > len(full) > len(fitting) > 2
    _, found = opened(render_page(whole), tmp_path, USE, place="#tensor=4&zero=3")
    assert [int(found[name]) for name in ("first", "second", "third")] == [
        len(small),
        len(full),
        len(fitting),
    ]
    assert found["pin"]
    assert found["free"]
    assert found["none"] == ["0", "No layout passes these filters."]
    assert int(found["last"]) == len(every)


FLAT = """
found.rows = $("timeline").querySelectorAll(".bar").length;
found.cells = document.querySelectorAll("#map i").length;
found.shown = $("shown").textContent;
"""


@browser
def test_a_page_without_a_pipeline_of_a_long_search_and_with_hostile_names_draws_too(tmp_path: Path) -> None:
    evil = "</script><script>throw 1</script><img src=x onerror=throw>"
    whole = answer(job=evil, runner_up=None, candidates=(candidates() * 12)[: CANDIDATES + 500])
    flat = {
        **whole["best"],
        **candidate(1, 8, 1, 8, 3, 1, "full"),
        "kind": evil,
        "timeline": None,
        "links": [],
    }
    page = render_page({**whole, "best": {**flat, "map": placed(16, 16, 8)}})
    attributes, found = opened(page, tmp_path, FLAT)
    assert attributes["data-shown"] == "5000"
    assert (
        found["shown"]
        == "20,000 of 20,500 layouts; the best 5,000 are drawn; this page holds the best 20,000."
    )
    assert found["rows"] == 1
    assert found["cells"] == 16 * 16


@browser
@pytest.mark.parametrize(
    ("flags", "background"), [((), (251, 251, 249)), (("--force-dark-mode",), (20, 24, 28))]
)
def test_the_page_is_light_or_dark_as_the_reader_asked(
    tmp_path: Path, flags: tuple[str, ...], background: tuple[int, ...]
) -> None:
    picture = tmp_path / "page.png"
    run_chromium(
        render_page(answer()), tmp_path, *flags, f"--screenshot={picture}", "--window-size=1400,3200"
    )
    assert _png(picture.read_bytes()) == (1400, 3200, background)


def _png(data: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Width, height and the first pixel: nothing lies before it, so no filter of PNG changes it."""
    packed, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    width, height = struct.unpack(">II", data[16:24])
    return width, height, tuple(zlib.decompress(packed)[1:4])
