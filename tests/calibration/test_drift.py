"""A planted shift is noticed, and fitted away; where nothing shifts nothing is said."""

import logging

import pytest
import torch

from dspark_train.calibration import Scaling, expected_calibration_error
from dspark_train.calibration.drift import DriftMonitor
from tests.calibration.planted import planted_traces

P = 3


def feed(monitor: DriftMonitor, kind: str, traces) -> list:
    found = [
        monitor.observe(kind, logits, accepted, P)
        for logits, accepted in zip(traces.logits, traces.accepted.tolist(), strict=True)
    ]
    return [drift for drift in found if drift]


def errors(monitor: DriftMonitor, kind: str, traces) -> list[float]:
    product = monitor.scaling(kind).products(traces.logits)
    return [float(expected_calibration_error(product[:, k], traces.accepted > k)) for k in range(P)]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_said_while_nothing_shifts(seed) -> None:
    monitor = DriftMonitor(Scaling.of(torch.full((P,), 1.5)))
    assert feed(monitor, "chat", planted_traces([1.5] * P, 10_000, seed)) == []


def test_a_shift_is_noticed_and_fitted_away(caplog) -> None:
    monitor = DriftMonitor(Scaling.none(P))
    feed(monitor, "chat", planted_traces([1.0] * P, 1500, 1))
    fresh = planted_traces([3.0] * P, 8000, 7)
    assert max(errors(monitor, "chat", fresh)) > 0.1
    with caplog.at_level(logging.WARNING):
        found = feed(monitor, "chat", planted_traces([3.0] * P, 4000, 2))
    assert 1 <= len(found) <= P
    assert found[0].predicted > found[0].observed
    assert "calibration has drifted for chat: slot" in caplog.text
    assert max(errors(monitor, "chat", fresh)) < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_confidences_that_are_no_numbers_disturb_nobody(bad) -> None:
    """Of one poisoned request; the others are watched and fitted as if it were not there."""
    monitors = [DriftMonitor(Scaling.none(P)) for _ in range(2)]
    traces = planted_traces([3.0] * P, 4000, 2)
    feed(monitors[0], "chat", traces)
    for logits, accepted in zip(traces.logits, traces.accepted.tolist(), strict=True):
        assert monitors[1].observe("chat", torch.full((P,), bad), 0, 1) is None
        monitors[1].observe("chat", logits, accepted, P)
    first, second = (monitor.scaling("chat") for monitor in monitors)
    assert first.shift == second.shift
    assert torch.equal(first.temperatures, second.temperatures)


def test_classes_do_not_touch_each_other() -> None:
    monitor = DriftMonitor(Scaling.none(P))
    feed(monitor, "code", planted_traces([3.0] * P, 4000, 2))
    assert monitor.scaling("chat") is monitor.start
    assert monitor.scaling("code").temperatures[0] > 2


def test_a_warning_without_a_fit() -> None:
    monitor = DriftMonitor(Scaling.none(P), refit=False)
    assert feed(monitor, "chat", planted_traces([3.0] * P, 4000, 2))
    assert monitor.scaling("chat") is monitor.start
