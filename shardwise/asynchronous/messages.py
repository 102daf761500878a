"""The messages between workers and servers: one frozen value for each, sent as JSON.

A worker greets every server and learns which slices of the weights that server holds. Then it asks the first
server, whose scheduler hands out the work, for a portion; pulls the weights from each server; pushes its
gradient to each; and tells the scheduler that the portion is finished. Weights and gradients follow the
messages `Weights` and `Push`, flat, slice after slice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

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
    """The answer of a server to `Hello`."""

    slices: dict[str, tuple[tuple[Count, Count], ...]]
    """The slice of each parameter that this server holds, as (start, stop) along each dim."""
    job: Name
    """Checksum of the server's job."""
    rows: Count
    """Number of rows of a portion."""
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
    """The answer to `Push`: the server has stored the gradient."""

    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class Bring:
    """A worker tells the scheduler that every server has the gradient of this portion. The loss is a sum over
    items: tokens, or what a user's module counts."""

    portion: Count
    loss: float
    items: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tokens: Count
    checksum: Count
    kind: Literal["bring"] = "bring"


@dataclass(frozen=True)
class Noted:
    """The answer to `Bring`: whether the portion counts; it does not if another worker was first."""

    counts: bool
    kind: Literal["noted"] = "noted"


FromWorker = Hello | Ask | Pull | Push | Bring
FromServer = Welcome | Task | Wait | End | Weights | Stored | Noted
Message = FromWorker | FromServer
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def to_json(message: Message) -> dict[str, object]:
    """Return a message as the JSON object that is sent."""
    return asdict(message)


def from_json(value: dict[str, object]) -> Message:
    """Return the message that a received JSON object stands for."""
    try:
        return _MESSAGE.validate_python(value)
    except ValueError as error:
        raise UntrustedMessage(f"no message: {error}") from None
