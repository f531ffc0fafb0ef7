"""Some of many, evenly over their order."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(rows: Sequence[T], count: int) -> list[T]:
    """At most `count` of `rows`, evenly over their order."""
    taken = min(count, len(rows))
    return [rows[i * len(rows) // taken] for i in range(taken)]
