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
    """A parameter server (`train.driver = "server"`): each of the --workers computes on one device, and the
    processes of `servers` are started in addition."""

    servers: Degree = Field(1, description="processes that share the weights and the optimizer's state")
    portions: Positive | None = Field(
        None,
        description="parts of the global batch, each computed by one worker; left out: one for each worker",
    )
    max_staleness: NonNegative | Literal["unbounded"] = Field(
        0,
        description="largest staleness: the number of updates that the weights have had since the worker of "
        "a gradient read them; 0: each update waits for the whole batch, as in a synchronous run; "
        "`unbounded`: no limit",
    )
    prediction: bool = Field(
        True,
        description="if gradients may be stale, hand out the weights that the optimizer's momentum "
        "predicts for the time when the gradient arrives",
    )
    damping: bool = Field(
        False,
        description="divide the learning rate of an update by one more than the staleness of its gradients",
    )
    backups: bool = Field(
        False,
        description="a worker that would have to wait computes a portion that another worker has not "
        "finished; the first result counts",
    )

    compression: str | None = Field(
        None,
        description="codec of the gradients that are sent to the servers: one of layout.compression, but not "
        "`powersgd`; a worker adds what it left out to its next gradient",
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
