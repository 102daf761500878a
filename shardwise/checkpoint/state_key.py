"""Keys of the tensors that a run's state consists of: typed values in code, one line of text on disk.

This is the only file that writes or parses that text:

    model.NAME                          a weight of the model, or one of its saved buffers
    optimizer.NAME.SLOT                 what the optimizer keeps for one parameter, such as exp_avg
    group.N.model.NAME                  group N's own copy of a weight or buffer (drivers/local.py)
    group.N.optimizer.NAME.SLOT         what group N's optimizer keeps for one parameter
    group.N.outer.own.NAME              by how much group N had moved a parameter when an exchange began
    outer.mean.NAME                     the mean of these differences over all groups
    outer.momentum.NAME                 momentum of the outer optimizer
    residual.AXIS.NAME@BOX/2of4         what compression left out of device 2's gradients
    factor.AXIS.NAME@BOX/0              PowerSGD's factor of a slice, equal on the devices that sum together
    random.RANK.cpu                     state of a rank's random generator
    program.state                       values that a user's program keeps (engine.state)
    file.NAME                           a file of the Hugging Face folder that the model came from

NAME is chosen by whoever wrote the model, and may contain any of these words: `inner_optimizer.weight` is the
name of a weight. So the first words of a text decide alone, and no code may search for a word inside of it.

A text that has none of these forms gets the kind OTHER, so that a checkpoint with tensors of a later version
can still be opened. `str(StateKey.parse(text)) == text` holds for every text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

Box = tuple[tuple[int, int], ...]
"""Where a slice of a tensor begins and ends in each dim."""


class StateKind(Enum):
    """The kind of a tensor. The value is the prefix of its text; no prefix but OTHER's begins another."""

    MODEL = "model."
    OPTIMIZER = "optimizer."
    OUTER_OWN = "outer.own."
    OUTER_MEAN = "outer.mean."
    OUTER_MOMENTUM = "outer.momentum."
    RESIDUAL = "residual."
    FACTOR = "factor."
    RANDOM = "random."
    PROGRAM = "program."
    FILE = "file."
    OTHER = ""

    @property
    def section(self) -> str:
        """The first word of the text of tensors that belong to the whole run."""
        return self.value.partition(".")[0]


_OF_GROUPS = (StateKind.MODEL, StateKind.OPTIMIZER, StateKind.OUTER_OWN)
"""Kinds of which a group of `train.driver = "local"` may have a tensor for itself."""
_GROUP = re.compile(r"group\.(\d{1,9})\.")
_EDGES = r"\d{1,18}:\d{1,18}"
_SLICE = re.compile(rf"([^.]+)\.(.+)@((?:{_EDGES}(?:,{_EDGES})*)?)/(\d{{1,9}})(?:of(\d{{1,9}}))?", re.DOTALL)
_HISTORY = re.compile(r".+\.float8\.((gate_up|down)\.)?(input|gradient)\.maxima", re.DOTALL)


@dataclass(frozen=True)
class GradientSlice:
    """The slice of a parameter's gradient that a residual or factor is for, and the device that holds it."""

    axis: str
    """The axis along which gradients are summed. It contains no dot."""
    box: Box
    device: int
    """Index of the device; for a factor, of the devices that sum together."""
    devices: int | None = None
    """Number of devices with a residual of this parameter; None for a factor."""


@dataclass(frozen=True)
class StateKey:
    """Identifies one tensor of a run's state, under every layout."""

    kind: StateKind
    name: str
    """Name of the parameter, buffer or file; for a random generator its rank; for OTHER the whole text."""
    slot: str = ""
    """Name of an optimizer state, such as exp_avg; for a random generator, cpu or cuda."""
    group: int | None = None
    """Number of the group to which this tensor belongs; None: it belongs to the run."""
    part: GradientSlice | None = None
    """Slice of a residual or factor; None for other tensors."""

    @classmethod
    def model(cls, name: str) -> StateKey:
        """Return the key of a weight or saved buffer of the model."""
        return cls(StateKind.MODEL, name)

    @classmethod
    def optimizer(cls, name: str, slot: str) -> StateKey:
        """Return the key of what the optimizer keeps in a slot for a parameter."""
        return cls(StateKind.OPTIMIZER, name, slot)

    @classmethod
    def random(cls, rank: int, device: str) -> StateKey:
        """Return the key of a rank's random generator for this type of device."""
        return cls(StateKind.RANDOM, str(rank), device)

    @classmethod
    def program(cls) -> StateKey:
        """Return the key of the values that a user's program keeps."""
        return cls(StateKind.PROGRAM, "state")

    @classmethod
    def parse(cls, text: str) -> StateKey:
        """Return the key that a text on disk stands for."""
        match = _GROUP.match(text)
        group, rest = (int(match[1]), text[match.end() :]) if match else (None, text)
        kind = next(kind for kind in StateKind if rest.startswith(kind.value))
        key = _parse_body(kind, rest.removeprefix(kind.value), group)
        return key if key is not None and str(key) == text else cls(StateKind.OTHER, text)

    def __str__(self) -> str:
        """Return the text that stands for this key on disk."""
        group = "" if self.group is None else f"group.{self.group}."
        return f"{group}{self.kind.value}{self._body()}"

    def _body(self) -> str:
        if self.part is None:
            return f"{self.name}.{self.slot}" if self.slot else self.name
        box = ",".join(f"{begin}:{end}" for begin, end in self.part.box)
        devices = "" if self.part.devices is None else f"of{self.part.devices}"
        return f"{self.part.axis}.{self.name}@{box}/{self.part.device}{devices}"

    def of_group(self, group: int) -> StateKey:
        """Return the key of this group's own tensor of the same meaning."""
        assert self.kind in _OF_GROUPS, f"a group has no {self} of its own"
        return replace(self, group=group)

    @property
    def is_model(self) -> bool:
        """Whether this is a weight or buffer of the run's model, and not a group's copy of one."""
        return self.kind is StateKind.MODEL and self.group is None

    @property
    def is_float8_history(self) -> bool:
        """Whether this buffer holds the largest magnitudes that a float8 product saw
        (models/float8_products.py)."""
        return self.kind is StateKind.MODEL and _HISTORY.fullmatch(self.name) is not None

    @property
    def section(self) -> str:
        """The first word of the text, by which messages name several tensors at once."""
        return str(self).partition(".")[0]


def split_scale_name(name: str) -> tuple[str, str]:
    """Split the name of a float8 scale into the module that multiplies, and which of its tensors is scaled:
    `head.float8.input` into `head` and `input`."""
    module, _, tensor = name.partition(".float8.")
    return module, tensor


def _parse_body(kind: StateKind, body: str, group: int | None) -> StateKey | None:
    """Return the key of a text without its first words; None where a tensor of this kind has no such text."""
    if group is not None and kind not in _OF_GROUPS:
        return None
    if kind in (StateKind.RESIDUAL, StateKind.FACTOR):
        return _parse_slice(kind, body)
    if kind in (StateKind.OPTIMIZER, StateKind.RANDOM):
        name, _, slot = body.rpartition(".")
        return StateKey(kind, name, slot, group)
    return StateKey(kind, body, group=group)


def _parse_slice(kind: StateKind, body: str) -> StateKey | None:
    match = _SLICE.fullmatch(body)
    if match is None or (match[5] is None) != (kind is StateKind.FACTOR):
        return None
    edges = [part.split(":") for part in match[3].split(",") if part]
    box = tuple((int(begin), int(end)) for begin, end in edges)
    devices = None if match[5] is None else int(match[5])
    return StateKey(kind, match[2], part=GradientSlice(match[1], box, int(match[4]), devices))
