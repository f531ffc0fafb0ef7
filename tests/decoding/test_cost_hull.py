"""The hull of a cost table, and what lies above it."""

import numpy as np
import pytest

from dspark_train.decoding.cost_hull import cliffs, convex
from dspark_train.decoding.cost_table import CostTable


def test_a_slope_that_was_measured_coarsely_is_a_slope() -> None:
    """The table prices what nobody measured as dear; the hull does not."""
    true = 1.0 + np.arange(1, 65) / 10
    coarse = CostTable((1, 16, 64), (0,), (tuple(true[[0, 15, 63]]),))
    assert coarse.verify_seconds(64)[17] == pytest.approx(true[63])
    assert convex(coarse).verify_seconds(64)[1:] == pytest.approx(true)
    assert cliffs(coarse).max() == pytest.approx(0)


def test_a_hull_is_below_the_table_convex_and_never_falls() -> None:
    random = np.random.default_rng(0)
    seconds = tuple(tuple(1 + np.arange(40) / 20 + random.random(40)) for _ in range(2))
    costs = CostTable(tuple(range(1, 41)), (0, 100), seconds, (1,), (0.5,))
    smooth = convex(costs)
    assert smooth.draft_seconds == (0.5,)
    for context in (0, 30, 100):
        hull, table = (c.verify_seconds(40, context)[1:] for c in (smooth, costs))
        assert (hull <= table + 1e-9).all()
        assert (np.diff(hull) >= -1e-9).all()
        assert (np.diff(hull, 2) >= -1e-9).all()


def test_cliffs_are_found_where_they_are() -> None:
    seconds = [1.0] * 16 + [2.0] * 16 + [2.0 + n / 8 for n in range(32)]
    above = cliffs(CostTable(tuple(range(1, 65)), (0,), (tuple(seconds),)))
    assert above[17] == above.max() > 0.5
    assert above[40:].max() < 0.05
    assert len(above) == 65
