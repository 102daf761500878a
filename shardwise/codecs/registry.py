"""The codecs by name: those of this folder, and those of other packages.

A package adds a codec by an entry point of the group `shardwise.codecs`. Its name is the codec's name in a
job, and its value is the class, a subclass of `RowCodec`:

    [project.entry-points."shardwise.codecs"]
    mine = "my_package.codec:Mine"

The class is imported when a job names it. So a broken package stops only the jobs that use its codec.
"""

from __future__ import annotations

import re
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
BUILT_IN: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (BFloat16, Float16, Float8, Int8, Int4, TernGrad, Sign, TopK, RandomK, QSGD, PowerSGD)
}
"""The codecs of this folder by name."""
_loaded: dict[str, type[RowCodec]] = {}
"""The codecs of other packages that a job of this process has named."""


def _find(name: str) -> type[Codec] | None:
    """Return the codec of this name, or None; raise a `UserError` if it cannot be used."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in _loaded and (entries := tuple(entry_points(group=GROUP, name=name))):
        _loaded[name] = _load(entries[0])
    return _loaded.get(name)


def _load(entry: EntryPoint) -> type[RowCodec]:
    """Return the class that an entry point names; raise a `UserError` if it is not a complete codec."""
    what = f"the codec {entry.name!r} of another distribution ({entry.value}, entry point group {GROUP})"
    try:
        codec = entry.load()
    except Exception as error:
        raise UserError(
            f"{what} cannot be imported: {type(error).__name__}: {error}; repair that distribution, or "
            "uninstall it"
        ) from error
    if not (isinstance(codec, type) and issubclass(codec, RowCodec)):
        raise UserError(f"{what} is no subclass of shardwise.codecs.RowCodec; name the class itself")
    attributes = {name for name in ("name", "host_nanoseconds") if not hasattr(codec, name)}
    if missing := sorted(attributes | codec.__abstractmethods__):
        raise UserError(f"{what} lacks {', '.join(missing)}")
    if codec.name != entry.name:
        raise UserError(f"{what} declares name = {codec.name!r}; give both the same name")
    return codec


def weight_codecs() -> list[str]:
    """Return the names of the codecs that weights may be gathered with: those of this folder, and those of
    other packages that a job of this process has named."""
    return [name for name, codec in {**BUILT_IN, **_loaded}.items() if codec.for_weights]


def parse_codec(text: str) -> Codec:
    """Return the codec that a job writes like this, for example `topk(0.01)`, or raise a `ValueError`."""
    match = re.fullmatch(r"([\w-]+)(?:\(([^()]*)\))?", text.strip())
    codec = None if match is None else _find(match[1])
    if match is None or codec is None:
        added = {entry.name for entry in entry_points(group=GROUP)} - BUILT_IN.keys()
        raise ValueError(f"no codec {text!r}; one of {', '.join([*built_in_usages(), *sorted(added)])}")
    argument = match[2]
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


def built_in_usages() -> list[str]:
    """Return how a job writes each codec of this folder, for example `topk(0.01)`."""
    return [codec.usage() for codec in BUILT_IN.values()]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
