"""The settings of the parameter server (drivers/server.py), which its ranks and its workers read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from shardwise.codecs import RowCodec, parse_row_codec
from shardwise.section import Degree, NonNegative, Positive, Section

if TYPE_CHECKING:
    from shardwise.config import Config

TABLE = "server"
"""Name of the table in a job, which is the driver's name."""


class ServerSettings(Section):
    """A parameter server (`train.driver = "server"`): --workers are one device each, and as many servers come
    on top."""

    servers: Degree = Field(1, description="processes that share the weights and the optimizer's state")
    portions: Positive | None = Field(
        None,
        description="pieces of the global batch, each computed by one worker; left out: as many as there are "
        "workers",
    )
    max_staleness: NonNegative | Literal["unbounded"] = Field(
        0,
        description="updates that the weights may have had between a worker's reading them and the use of "
        "its gradient; 0: each update waits for the whole batch, as in a synchronous run",
    )
    prediction: bool = Field(
        True,
        description="where gradients are stale, hand out weights as they will be when the gradient comes, by "
        "AdamW's momentum",
    )
    damping: bool = Field(
        False,
        description="divide the learning rate of an update by one more than the staleness of its gradients",
    )
    backups: bool = Field(
        False,
        description="a worker that would have to wait computes a portion that another has not brought yet, "
        "and the first counts",
    )

    compression: str | None = Field(
        None,
        description="how gradients are sent to the servers, as in layout.compression but for `powersgd`; "
        "what a worker leaves out it adds to its next one",
    )

    @field_validator("compression")
    @classmethod
    def _known(cls, text: str | None) -> str | None:
        return None if text is None else str(parse_row_codec(text))

    @property
    def codec(self) -> RowCodec | None:
        """The codec of gradients; None: they are not encoded."""
        return None if self.compression is None else parse_row_codec(self.compression)

    @property
    def predicts(self) -> bool:
        """Whether workers get extrapolated weights, instead of the present ones."""
        return self.prediction and self.max_staleness != 0

    @property
    def staleness_bound(self) -> int | None:
        """The largest staleness of a gradient; None: there is no bound."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


def server_settings(config: Config) -> ServerSettings:
    """Return the table `[server]` of a job."""
    table = getattr(config, TABLE)
    assert isinstance(table, ServerSettings), "the schema made it"
    return table


def portions(config: Config) -> int:
    """Return the number of portions of a global batch."""
    count = server_settings(config).portions
    assert count is not None, "filled in before workers start"
    return count
