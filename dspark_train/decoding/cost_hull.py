"""The lower convex hull of a cost table, and how far the table is above it.

Expected tokens are concave in the size of the batch. On a convex curve Θ has one top, and a search
that stops at the first drop finds it, with live confidences. Cliffs are what such a search cannot
get past: measured ones, and those that a table guesses between sizes which nobody measured.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dspark_train.decoding.cost_table import CostTable

Point = tuple[float, float]


def convex(costs: CostTable, low: int = 1, high: int | None = None) -> CostTable:
    """The table under its hull, between the measurements that enclose `low` and `high`.

    `high` None is the largest. Only these and those between them take part: others would draw the
    hull to prices that nobody is about to pay.
    """
    known = np.array(costs.tokens)
    high = min(high or known[-1], known[-1])
    first = max(int(known.searchsorted(low, side="right")) - 1, 0)
    last = int(known.searchsorted(high)) + 1
    corners = known[first:last]
    sizes = np.arange(corners[0], corners[-1] + 1)
    rows = tuple(tuple(_hull(corners, row[first:last], sizes).tolist()) for row in costs.seconds)
    return replace(costs, tokens=tuple(sizes.tolist()), seconds=rows)


def cliffs(costs: CostTable) -> np.ndarray:
    """How far above the hull every measured size lies, `[largest size + 1]`; 0.2 is a fifth."""
    above = np.zeros(max(costs.tokens) + 1)
    sizes = np.array(costs.tokens)
    for row in costs.seconds:
        above[sizes] = np.maximum(above[sizes], np.array(row) / _hull(sizes, row, sizes) - 1)
    return above


def _hull(sizes: Sequence[int], seconds: Sequence[float], at: np.ndarray) -> np.ndarray:
    """The hull of points of ascending sizes, at sizes `at`; it never falls."""
    # a larger batch that was timed faster shows what a smaller one may cost
    least = np.minimum.accumulate(np.asarray(seconds)[::-1])[::-1]
    corners: list[Point] = []
    for point in zip(sizes, least.tolist(), strict=True):
        while len(corners) > 1 and _is_above(*corners[-2:], point):
            corners.pop()
        corners.append(point)
    return np.interp(at, *zip(*corners, strict=True))


def _is_above(first: Point, middle: Point, last: Point) -> bool:
    """Whether `middle` lies on or above the line from `first` to `last`."""
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (y1 - y0) * (x2 - x0) >= (y2 - y0) * (x1 - x0)
