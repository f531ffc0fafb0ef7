"""A request on its way through the batcher, and what is said about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from dspark_train.decoding.request import Request


class QueueFullError(Exception):
    """No more requests may wait."""


class StoppedError(Exception):
    """The batcher is closed or closing."""


@dataclass(frozen=True)
class Progress:
    """New tokens of a request, from `start` on (0: its first), or its end.

    Attributes:
        text: what they add to the text.
        end: why it ended; "cancelled" and "failed" as well as the reasons of a request.
        error: what went wrong, where it failed.
    """

    start: int
    stop: int
    text: str
    end: Literal["stop", "length", "cancelled", "failed"] | None = None
    error: str | None = None


# called in the batcher's thread: it must return at once, and not raise
Sink = Callable[[Progress], None]


@dataclass
class Ticket:
    """A request on its way: `read` tokens of its prompt are read, `told` new ones handed on."""

    request: Request
    sink: Sink
    number: int
    came: float = field(default_factory=monotonic)
    read: int = 0
    told: int = 0
    last: float = 0.0
    cancelled: bool = False
