"""What workers and servers say to each other: one frozen value for each message, JSON on the wire.

A worker greets every server and learns which slices of the weights that one keeps. Then it asks the first
server, whose scheduler hands out the work, for a portion; pulls the weights from each server; pushes its
gradient to each; and tells the scheduler that the portion is there. Weights and gradients travel behind
`Weights` and `Push`, flat, slice after slice.
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
    """A worker's first message to a server."""

    worker: Name
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Welcome:
    """The answer to `Hello`: which slices this server keeps, as (start, stop) along each dim by the name of
    the parameter; a checksum of its job; and the rows of a portion."""

    slices: dict[str, tuple[tuple[Count, Count], ...]]
    job: Name
    rows: Count
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class Ask:
    """A worker asks for a portion."""

    kind: Literal["ask"] = "ask"


@dataclass(frozen=True)
class Task:
    """Compute the gradient of this portion, with weights of this version or newer."""

    portion: Count
    version: Count
    kind: Literal["task"] = "task"


@dataclass(frozen=True)
class Wait:
    """There is no portion for now: the worker asks again."""

    kind: Literal["wait"] = "wait"


@dataclass(frozen=True)
class End:
    """All updates are made: the worker may end."""

    kind: Literal["end"] = "end"


@dataclass(frozen=True)
class Pull:
    """A worker asks for weights of this version or newer. `have` is the version that it has, which need not
    be sent; -1: it has none."""

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
    """The gradient has arrived."""

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
    """Whether the portion counts; it does not if another worker was first."""

    counts: bool
    kind: Literal["noted"] = "noted"


FromWorker = Hello | Ask | Pull | Push | Bring
FromServer = Welcome | Task | Wait | End | Weights | Stored | Noted
Message = FromWorker | FromServer
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as it is sent."""
    return asdict(message)


def from_json(value: dict[str, Any]) -> Message:
    """Return a message that was received."""
    try:
        return _MESSAGE.validate_python(value)
    except ValueError as error:
        raise UntrustedMessage(f"no message: {error}") from None
