"""What workers and servers say to each other: one frozen value for each message, JSON on the wire.

A worker greets every server and learns which slices of the weights that one keeps. Then it asks the first
server, whose desk deals out the work, for a portion; pulls the weights from each server; pushes its gradient
to each; and brings the portion back to the desk. Weights and gradients travel behind `Weights` and `Push`,
flat, slice after slice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from shardwise.resilience.channel import UntrustedMessage

Count = Annotated[int, Field(ge=0, lt=2**62)]
Name = Annotated[str, Field(max_length=256)]


@dataclass(frozen=True)
class Hello:
    """A worker's first word to a server."""

    worker: Name
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Welcome:
    """Which slices this server keeps: (start, stop) along each dim, by the name of the parameter. And of
    which job, whose portions have so many rows."""

    slices: dict[str, tuple[tuple[Count, Count], ...]]
    job: Name
    rows: Count
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class Ask:
    """What is there to do?"""

    kind: Literal["ask"] = "ask"


@dataclass(frozen=True)
class Task:
    """Compute the gradient of this portion, with weights of this version or newer."""

    portion: Count
    version: Count
    kind: Literal["task"] = "task"


@dataclass(frozen=True)
class Wait:
    """Nothing for now: ask again."""

    kind: Literal["wait"] = "wait"


@dataclass(frozen=True)
class End:
    """All is done."""

    kind: Literal["end"] = "end"


@dataclass(frozen=True)
class Pull:
    """The weights, please, of this version or newer, unless that is what the worker has; -1: it has none."""

    least: Count
    have: Annotated[int, Field(ge=-1, lt=2**62)]
    kind: Literal["pull"] = "pull"


@dataclass(frozen=True)
class Weights:
    """Weights of this version, behind the message unless the worker has them."""

    version: Count
    kind: Literal["weights"] = "weights"


@dataclass(frozen=True)
class Push:
    """The gradient of a portion, behind the message; encoded, if the run has a codec for it."""

    portion: Count
    kind: Literal["push"] = "push"


@dataclass(frozen=True)
class Stored:
    """It is here."""

    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class Bring:
    """The gradient of this portion is with every server. Its loss is a sum over items: tokens, or what a
    user's module counts."""

    portion: Count
    loss: float
    items: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tokens: Count
    checksum: Count
    kind: Literal["bring"] = "bring"


@dataclass(frozen=True)
class Noted:
    """Whether it counts."""

    counts: bool
    kind: Literal["noted"] = "noted"


FromWorker = Hello | Ask | Pull | Push | Bring
FromServer = Welcome | Task | Wait | End | Weights | Stored | Noted
Message = FromWorker | FromServer
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def to_json(message: Message) -> dict[str, Any]:
    """As sent."""
    return asdict(message)


def from_json(value: dict[str, Any]) -> Message:
    """As received."""
    try:
        return _MESSAGE.validate_python(value)
    except ValueError as error:
        raise UntrustedMessage(f"no message: {error}") from None
