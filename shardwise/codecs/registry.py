"""The codecs by name: those of this folder, and those that other distributions add.

A distribution adds a codec by an entry point of the group `shardwise.codecs` that names a subclass of
`RowCodec` or `MatrixCodec`. Its name in a job is the class's `name`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from shardwise.codecs.base import Codec, RowCodec
from shardwise.codecs.bfloat16 import BFloat16
from shardwise.codecs.float8 import Float8
from shardwise.codecs.float16 import Float16
from shardwise.codecs.int4 import Int4
from shardwise.codecs.int8 import Int8
from shardwise.codecs.powersgd import PowerSGD
from shardwise.codecs.qsgd import QSGD
from shardwise.codecs.randomk import RandomK
from shardwise.codecs.sign import Sign
from shardwise.codecs.terngrad import TernGrad
from shardwise.codecs.topk import TopK
from shardwise.errors import UserError

GROUP = "shardwise.codecs"
BUILT_IN: tuple[type[Codec], ...] = (
    BFloat16, Float16, Float8, Int8, Int4, TernGrad, Sign, TopK, RandomK, QSGD, PowerSGD,
)  # fmt: skip


@cache
def codecs() -> dict[str, type[Codec]]:
    """Return all codecs by name."""
    added = [_load(entry) for entry in entry_points(group=GROUP)]
    return {codec.name: codec for codec in (*added, *BUILT_IN)}


def _load(entry: EntryPoint) -> type[Codec]:
    """Return the class that an entry point names."""
    what = f"the codec {entry.name!r} of another distribution ({entry.value}, entry point group {GROUP})"
    try:
        codec = entry.load()
    except Exception as error:
        raise UserError(
            f"{what} cannot be imported: {type(error).__name__}: {error}; repair that distribution, or "
            "uninstall it"
        ) from error
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise UserError(f"{what} is no subclass of shardwise.codecs.RowCodec; name the class itself")
    return codec


def weight_codecs() -> list[str]:
    """Return the names of the codecs that weights may be gathered with."""
    return [name for name, codec in codecs().items() if codec.for_weights]


def parse_codec(text: str) -> Codec:
    """Return the codec that a job writes like this, for example `topk(0.01)`, or raise a `ValueError`."""
    match = re.fullmatch(r"([\w-]+)(?:\(([^()]*)\))?", text.strip())
    if match is None or match[1] not in codecs():
        known = ", ".join(codec.usage() for codec in codecs().values())
        raise ValueError(f"no codec {text!r}; one of {known}")
    codec, argument = codecs()[match[1]], match[2]
    if codec.argument is None:
        if argument is not None:
            raise ValueError(f"{codec.name} takes no number: write {codec.name}")
        return codec()
    number = _number(argument)
    if number is None or not codec.argument.accepts(number):
        raise ValueError(f"{codec.name} takes {codec.argument}: write {codec.usage()}")
    return codec(number)


def parse_row_codec(text: str) -> RowCodec:
    """Return the codec that a job writes like this, or raise a `ValueError`. It must encode slices of
    matrices."""
    codec = parse_codec(text)
    if not isinstance(codec, RowCodec):
        raise ValueError(f"{codec.name} works on whole matrices, and here slices of them are sent")
    return codec


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
