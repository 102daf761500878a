"""Read the rows of tables of measured runs, and the words and numbers in their cells.

A cell is understood, or it is empty, or the row is refused with a reason (`NotModelled`). Nothing is guessed
from a part of a cell. A number has only digits, with or without thousands commas (`4,096`): `8k`, `12910 ms`
and `12,91` are ambiguous. Words are those of the programs and papers from which such tables come.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.cost.clusters import CLUSTERS
from shardwise.errors import UserError

Row = Mapping[str, str]


class NotModelled(Exception):
    """Why a row has no place in the planner's model."""


# -- rows of a file ------------------------------------------------------------------------------------------


def read_table(path: Path) -> tuple[set[str], Iterator[tuple[int, Row | NotModelled]]]:
    """The columns, in lower case, and the rows by line; a row that is no row is the reason why."""
    lines = _text(path).splitlines(keepends=True)
    skipped = 0
    while skipped < len(lines) and _is_no_header(lines[skipped]):
        skipped += 1
    if skipped == len(lines):
        raise UserError(f"{path}: is empty")
    separator = max(",;\t", key=lines[skipped].count)
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO("".join(lines[skipped:]), newline=""), delimiter=separator, strict=True)
    try:
        names = [name.strip().lower().lstrip("# ") for name in next(reader)]
    except csv.Error as error:
        raise UserError(f"{path}: the first line is not CSV ({error})") from None
    return set(names), _rows(reader, names, skipped)


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        return raw.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _is_no_header(line: str) -> bool:
    """Blank, or a comment: vTrain's first column is called `# GPUs`, but others follow it."""
    return not line.strip() or (line.startswith("#") and not re.search(r"[,;\t]", line))


def _rows(reader: Any, names: list[str], skipped: int) -> Iterator[tuple[int, Row | NotModelled]]:
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # a quote that is never closed ends the file
            yield reader.line_num + skipped, NotModelled(f"not CSV: {error}")
            continue
        place = reader.line_num + skipped
        if any(cell.strip() for cell in cells[len(names) :]):
            yield place, NotModelled("more cells than columns")
        elif cells:
            yield place, _row(names, cells)


def _row(names: list[str], cells: list[str]) -> Row:
    """A column that is there twice with two values has both of them, and so is no number."""
    found: dict[str, list[str]] = {}
    for name, cell in zip(names, cells, strict=False):
        text = cell.strip()
        if text and text not in found.setdefault(name, []):
            found[name].append(text)
    return {name: " | ".join(texts) for name, texts in found.items()}


# -- numbers -------------------------------------------------------------------------------------------------

NOT_GIVEN = ("", "-", "?", "n/a", "na", "nan", "none", "null", "unknown", "not given", "not stated")
LARGEST = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "gpus": 1_000_000,
    "pp": 10_000,
    "vpp": 10_000,
}
"""Beyond these a row is a mistake, and would take the planner hours; 1e9 for all others."""


def digits(row: Row, key: str) -> str:
    """A number as it is written, without its commas; nothing where none is given."""
    text = row.get(key, "").lower()
    if text in NOT_GIVEN:
        return ""
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text) else text
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", plain) or not math.isfinite(float(plain)):
        raise NotModelled(f"{key}: {clipped(text)} is not a number")
    return plain


def measured(row: Row, key: str) -> float | None:
    """A figure that was measured; 0 stands for none, as in rows of runs that failed."""
    value = float(digits(row, key) or 0)
    if value < 0:
        raise NotModelled(f"{key}: {value:g} is below 0")
    return value or None


def whole(row: Row, key: str) -> int | None:
    """A size or degree, at least 1."""
    text = digits(row, key)
    if not text:
        return None
    value = float(text)
    if value < 1 or value != round(value):
        raise NotModelled(f"{key}: {text} is not a whole number above 0")
    if value > LARGEST.get(key, 10**9):
        raise NotModelled(f"{key}: {text} is beyond reason")
    return round(value)


def switched(row: Row, key: str) -> int | None:
    """The same for a degree of which 0 means that it is off."""
    return None if re.fullmatch(r"0+(\.0*)?", row.get(key, "")) else whole(row, key)


def needed(row: Row, key: str, what: str) -> int:
    """The same where nothing can be said without it."""
    value = whole(row, key)
    if value is None:
        raise NotModelled(f"{what} not given")
    return value


def clipped(text: str) -> str:
    """Short enough for a reason."""
    return text if len(text) <= 40 else text[:37] + "…"


def yes_or_no(row: Row, key: str) -> bool | None:
    """A switch, where it is given."""
    text = row.get(key, "").lower()
    if text in NOT_GIVEN:
        return None
    if re.fullmatch(r"0|0\.0|false|no|off|n|gelu|relu", text):
        return False
    if re.fullmatch(r"1|1\.0|true|yes|on|y|swiglu|geglu", text):
        return True
    raise NotModelled(f"{key}: {clipped(text)} is neither yes nor no")


# -- sentences -----------------------------------------------------------------------------------------------

_NEGATION = r"exclu|excl\b|without|w/o|\bnot?\b|\bnon|never|omit|ignor|minus|left out|except"


def says(text: str, words: str) -> bool:
    """Whether a clause has these words and does not negate them."""
    return any(re.search(words, clause) and not re.search(_NEGATION, clause) for clause in _clauses(text))


def denies(text: str, words: str) -> bool:
    """Whether a clause has these words and negates them."""
    return any(re.search(words, clause) and re.search(_NEGATION, clause) for clause in _clauses(text))


def _clauses(text: str) -> list[str]:
    return re.split(r"[,;:()+]|=>|\.\s|\bbut\b", text.lower())


def counts_recompute(convention: str) -> bool:
    """Whether FLOPs are said to count what is computed again."""
    return says(convention, r"recomput|remateriali|activation checkpoint")


# -- devices and networks ------------------------------------------------------------------------------------

_DEVICES = r"g?b300|g?b200|gh200|h200|h100|h800|h20\b|a100|a800|v100|mi\d{3}x?|l40s?|rtx\w*|p100|t4\b"


def device_key(text: str, program: str = "") -> str:
    """One spelling for a device, for instance `DGX-H100`, `h100_80gb` and `H100-SXM5` are all `h100`."""
    lower = text.lower()
    if lower in CLUSTERS:
        return lower
    if "tpu" in lower or "trainium" in lower or "gaudi" in lower:
        raise NotModelled("device: no preset for TPU, Trainium or Gaudi")
    names = list(dict.fromkeys(re.findall(_DEVICES, lower)))
    if len(names) != 1:
        raise NotModelled(
            f"device not known: {clipped(text) or 'none given'}"
            if not names
            else "device: more than one named"
        )
    name: str = names[0]
    sizes = [int(size) for size in re.findall(r"(\d+)\s*g(?:i?b)?(?![a-z/])", lower[lower.index(name) :])]
    if name in ("a100", "a800"):
        sizes += [int(size) for size in re.findall(r"[- _](40|80)\b", lower)]
        name += f"-{max(sizes) if sizes else 40 if '2020' in program else 80}"
    elif name in ("h100", "h800") and sizes and max(sizes) != 80:
        name += f"-{96 if 90 < max(sizes) < 100 else max(sizes)}"
    elif name == "v100":
        name = "dgx2" if "dgx-2" in lower else "v100-16" if 16 in sizes else name
    return name + ("-nvl" if re.search(r"\bnvl\b", lower) else "") + ("-pcie" if "pcie" in lower else "")


def node_size(text: str) -> int | None:
    """Devices of a node, where the words say so."""
    if "dgx-2" in text.lower():
        return 16
    found = re.search(r"(\d+)\s*(?:gpus?|devices)\s*(?:/|per|a)\s*node", text.lower())
    if found and not 1 <= int(found.group(1)) <= 576:
        raise NotModelled(f"net: {found.group(1)} devices per node is beyond reason")
    return int(found.group(1)) if found else None


_LINKS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


def network(text: str, per_node: int, assumed: list[str]) -> float | None:
    """Bytes/s for a device. `8x400G` and `8 x NDR` are what the adapters of a node have together; `per GPU`
    or `/GPU` makes a figure that of one device; a bare figure is that of a node. NVLink is not the network.
    `Gb`, `Gbit` and `G` are bits, `GB` bytes."""
    between = " ".join(part for part in re.split(r"[;,+]", text) if "nvl" not in part.lower())
    found = re.search(
        r"(?:(\d+)\s*x\s*)?(?:[EHNX]DR\s*)?(\d+(?:\.\d+)?)\s*([GT])(B(?![iI]?[tT])|b|\b)", between
    )
    if found:
        times, value, unit = found.group(1), float(found.group(2)), 1e9 if found.group(3) == "G" else 1e12
        width = 1 if found.group(4) == "B" and "GBE" not in between.upper() else 8
    else:
        found = re.search(r"(?:(\d+)\s*x\s*)?\b([ehnx]dr)\s*\d*\b", between.lower())
        if not found:
            return None
        times, value, unit, width = found.group(1), float(_LINKS[found.group(2)]), 1e9, 8
    if value == 0 or times == "0":
        raise NotModelled(f"net: {clipped(text)} is no bandwidth")
    each = re.search(r"(/|per|a|each)\s*(gpu|device|accelerator)", between.lower().replace("gpus/node", ""))
    if not (each or times or re.search(r"(/|per|a)\s*(node|server|host)", between.lower())):
        assumed.append("network: that of a node, where not said of what")
    return float(times or 1) * value * unit / width / (1 if each else per_node)


# -- programs and their choices ------------------------------------------------------------------------------

_MODERN = ("h100", "h200", "h800", "b200", "b300", "gb200", "gb300", "mi3")


def program_key(program: str, device: str = "", notes: str = "") -> str:
    """Key of a program's facts in planner_programs.py. Megatron-LM before 2023 had unfused attention, since
    2024 it hides the tensor axis' collectives behind products; without a year, the device and what is said of
    its attention tell which it was.
    """
    lower = program.lower()
    for words, key in ((r"shardwise", "shardwise"), (r"foundry|composer", "llm-foundry"), (r"titan",
    "torchtitan"),
                       (r"nanotron", "nanotron"), (r"vtrain", "vtrain"), (r"megatron.?bridge|\bnemo\b",
                       "nemo"),
                       (r"megascale|megatron.?core|mcore|core_r|transformer ?engine",
                       "megatron-core")):  # fmt: skip
        if re.search(words, lower):
            return key
    if "megatron" not in lower:
        return "other"
    if "deepspeed" not in lower and re.search(r"\bcore\b", lower):
        return "megatron-core"
    year = re.search(r"\b20([12]\d)\b", lower)
    modern = int(year.group(1)) >= 24 if year else device.startswith(_MODERN)
    flash = int(year.group(1)) == 23 if year else "flash" in notes.lower()
    if "deepspeed" in lower:  # a fork of the older one
        return "megatron-2023" if modern or flash else "megatron"
    return "megatron-core" if modern else "megatron-2023" if flash else "megatron"


def release(row: Row) -> tuple[int, int] | None:
    """Year and month of a release such as `25.05` or `v26.04.01`."""
    found = re.search(r"\bv?(2\d)\.(0[1-9]|1[0-2])\b", f"{row.get('fw', '')} {row.get('source_ref', '')}")
    return (int(found.group(1)), int(found.group(2))) if found else None


MEGATRON_LIKE = ("megatron", "megatron-2023", "megatron-core", "nemo")


def precision(row: Row, assumed: list[str]) -> str:
    """Return the precision of matrix products."""
    lower = row.get("precision", "").lower()
    if lower in NOT_GIVEN:
        assumed.append("precision bfloat16")
        return "bfloat16"
    for words, name in ((r"fp4", "float4"), (r"fp8|float8", "float8"), (r"bf16|bfloat16", "bfloat16"),
                        (r"fp16|float16|half", "float16"), (r"fp32|tf32|float32|single",
                        "float32")):  # fmt: skip
        if re.search(words, lower):
            return name
    raise NotModelled(f"precision: {clipped(lower)} not known")


_ZERO_WORDS = (
    (r"shard_grad_op|no reshard", 2),
    (r"no_shard|ddp|baseline|^no$|^off$|^false$|^dp$|^fsdp ?= ?0$", 0),
    (r"full_shard|fsdp|hsdp|hybrid", 3),
    (r"dist|optimizer|^os$|^true$|^yes$", 1),
)
_USUAL_ZERO = {
    "llm-foundry": 3,
    "torchtitan": 3,
    "megatron-core": 1,
    "nemo": 1,
    "megatron-2023": 0,
    "megatron": 0,
    "vtrain": 0,
}


def zero_stage(row: Row, stack: str, assumed: list[str]) -> int:
    """0 to 3, from `1`, `ZeRO-1`, `deepspeed stage 2` or FSDP's words."""
    text = row.get("zero_fsdp", row.get("zero", "")).lower()
    if text in NOT_GIVEN and text != "none":
        usual = _USUAL_ZERO.get(stack, 3 if "fsdp" in row.get("fw", "").lower() else 0)
        if usual or stack not in _USUAL_ZERO:
            assumed.append(f"ZeRO stage {usual}, as usual with the program")
        return usual
    if text == "none":
        return 0
    if "++" in text or re.search(r"fsdp ?= ?1$", text):
        raise NotModelled(f"zero_fsdp: {clipped(text)} may mean several things")
    number = re.fullmatch(r"([0-3])(?:\.0)?", text) or re.search(
        r"(?:zero|stage)[ _-]*([0-3])\b|^([0-3]) ?\(", text
    )
    if number:
        return int(next(group for group in number.groups() if group))
    stage = next((stage for words, stage in _ZERO_WORDS if re.search(words, text)), None)
    if stage is None:
        raise NotModelled(f"zero_fsdp: {clipped(text)} not known")
    return stage


def sharding_group(row: Row, per_node: int, assumed: list[str]) -> int | None:
    """Devices that share what is sharded, where they are fewer than all: `FSDP=64`, `fsdp_size=8`, `within 8
    GPUs`."""
    text = row.get("zero_fsdp", "").lower()
    found = re.search(r"(?:fsdp|hsdp|shards?|group|size|degree)\w*\s*=\s*(\d+)|within (\d+)", text)
    if found:
        return int(found.group(1) or found.group(2)) or None
    if re.search(r"hsdp|hybrid|within a node", text):
        assumed.append("sharded within a node, replicated between nodes")
        return per_node
    return None


_NO_RECOMPUTE = r"none|no|n|off|false|0|0\.0"
_SELECTIVE = r"select|\battn|attention|norm|\bact\b|_act|act_|mlp|moe|core|up_?proj|shared_experts"
_FULL = r"full|block|\ball\b|yes|true|uniform|every layer|on\b|^y$|^1$|^1\.0$"


def recompute(row: Row, layers: int, assumed: list[str]) -> tuple[str, float]:
    """One of none, selective and full, and the share of the layers of which it is true."""
    text = row.get("recompute", "").lower()
    if text in NOT_GIVEN and text != "none":
        # the Megatron-LM of 2020 and 2021 checkpointed every layer in its published runs, and counts the
        # FLOPs
        counted = "2020" in row.get("fw", "") or counts_recompute(row.get("flop_convention", ""))
        assumed.append("nothing recomputed where none is named, unless its FLOPs are counted")
        return ("full", 1.0) if counted else ("none", 1.0)
    if re.fullmatch(_NO_RECOMPUTE, text):
        return "none", 1.0
    every = re.search(r"every (?:(\d+)\w* |(second|other) )", text)
    if every or "selective_layer" in text:
        return "full", 1 / int(every.group(1) if every and every.group(1) else 2)
    some = re.search(r"(\d+)\s*(?:(?:/|of)\s*\d+\s*)?(?:layers?|blocks?)", text)
    if some:
        if not 0 <= int(some.group(1)) <= layers:
            raise NotModelled(f"recompute: {clipped(text)}, but there are {layers} layers")
        return ("full", int(some.group(1)) / layers) if int(some.group(1)) else ("none", 1.0)
    for words, mode in ((_SELECTIVE, "selective"), (_FULL, "full"), (rf"^({_NO_RECOMPUTE})\b", "none")):
        if re.search(words, text):
            return mode, 1.0
    raise NotModelled(f"recompute: {clipped(text)} not known")


def recomputed_modules(row: Row) -> set[str]:
    """What follows where recomputation names modules (`norm, act`, `mlp`, `layernorm moe`): attention is not
    among them, and feed-forward layers are, or their activations alone (`moe_act`)."""
    text = re.sub(r"selective\w*", "", row.get("recompute", "").lower())
    if not re.search(r"norm|act\b|mlp|moe|shared|up_?proj", text) or re.search(
        r"full|block|layers|every", text
    ):
        return set()
    says = {
        "recomputes_mlp": re.search(r"\b(mlp|moe)\b", text),
        "keeps_attention": not re.search(r"att|core", text),
    }
    return {trait for trait, said in says.items() if said}


def schedule(row: Row, pipeline: int) -> tuple[str, int]:
    """The pipeline's schedule, and its stages on a rank."""
    text, virtual = re.sub(r"[^a-z0-9]", "", row.get("schedule", "").lower()), switched(row, "vpp") or 1
    if pipeline == 1:
        return "1f1b", 1
    for word, name in (
        ("gpipe", "gpipe"),
        ("dualpipe", "dualpipev"),
        ("zbv", "zbv"),
        ("zb", "zb1p"),
        ("zerobubble", "zb1p"),
    ):
        if word in text:
            return name, 2 if name in ("zbv", "dualpipev") else 1
    if virtual > 1 or "interleaved" in text:
        return "interleaved", max(2, virtual)
    if text not in NOT_GIVEN and not re.search(r"1f1b|pipedream|default", text):
        raise NotModelled(f"schedule: {clipped(text)} not known")
    return "1f1b", 1


# -- what came of it -----------------------------------------------------------------------------------------


def status(row: Row) -> str:
    """ok, out_of_memory, or failed."""
    text = re.sub(r"[^a-z]", "", row.get("status", "").lower())
    if "oom" in text or "outofmemory" in text:
        return "out_of_memory"
    if re.fullmatch(
        r"|ok(ay)?|success(ful)?|succeeded|completed?|done|pass(ed)?|ran|finished|valid|stable|memorytheory",
        text,
    ):
        return "ok"
    if re.fullmatch(r"measured|published|reported", text):
        return "ok"
    if re.search(
        r"fail|error|crash|kill|timeout|timedout|hung|hang|abort|cancel|skip|diverg|nan|invalid|unsupported|not",
        text,
    ):
        return "failed"
    raise NotModelled(f"status: {clipped(row['status'])} not known")
