"""A shift of all confidences is recovered, apart from temperatures, and mends what they cannot."""

import pytest
import torch

from dspark_train.calibration import Scaling, expected_calibration_error
from dspark_train.calibration.scaling import STEEP, fit_shift
from dspark_train.calibration.sts import fit_temperatures
from tests.calibration.planted import planted_traces


def worst(scaling: Scaling, traces) -> float:
    """The largest error of a slot."""
    product = scaling.products(traces.logits)
    slots = range(product.shape[1])
    return max(float(expected_calibration_error(product[:, k], traces.accepted > k)) for k in slots)


@pytest.mark.parametrize("shift", [-0.6, 0.0, 0.9])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_a_planted_shift_is_recovered_whatever_the_temperature(shift, temperature) -> None:
    traces = planted_traces([temperature] * 3, 40_000, shift=shift)
    fitted = Scaling.fit(traces.logits, traces.accepted, traces.known)
    shifts = fitted.shift + fitted.slot_shifts
    assert shifts.tolist() == pytest.approx([shift] * 3, abs=0.1)
    assert fitted.temperatures.tolist() == pytest.approx([temperature] * 3, rel=0.12)


def test_a_shift_mends_what_temperatures_cannot() -> None:
    """A head that promises too much everywhere, as after training on few answers."""
    fit, fresh = planted_traces([1.0] * 4, 20_000, shift=-0.8).halves()
    published = fit_temperatures(fit.logits, fit.accepted, fit.known)
    assert worst(Scaling.none(4), fresh) > 0.09
    assert worst(Scaling.of(published), fresh) > 0.07
    assert worst(Scaling.fit(fit.logits, fit.accepted, fit.known), fresh) < 0.015


def test_the_mean_is_met_where_the_logits_say_nothing_or_the_opposite() -> None:
    """No slope that a temperature can be: the shift alone brings the mean to what was seen."""
    logits = torch.tensor([[2.0], [-2.0]]).repeat(500, 1)
    accepted = torch.tensor([0, 1, 0, 0, 0, 1, 0, 0, 0, 1]).repeat(100)  # never at the higher one
    shift = fit_shift(logits, accepted, torch.ones(1000))
    chance = ((logits + shift) / STEEP).sigmoid()
    assert chance.mean().item() == pytest.approx(0.3, abs=1e-6)


def test_each_slot_has_a_shift_of_its_own() -> None:
    """Of a few rounds it is what all slots share; nothing moves where a slot is never reached."""
    traces = planted_traces([1.0] * 3, 40_000)
    wrong = torch.tensor([0.5, -0.3, 0.0])
    told = traces.shifted(wrong)
    fitted = Scaling.fit(told.logits, told.accepted, told.known)
    assert fitted.shift + fitted.slot_shifts == pytest.approx(-wrong.double(), abs=0.07)
    assert fitted.temperatures.tolist() == pytest.approx([1.0] * 3, rel=0.15)
    shared = fitted.without_slots(told.logits, told.accepted, told.known)
    assert shared.shifts.tolist() == [fitted.shift] * 3
    assert torch.equal(
        shared.temperatures, fit_temperatures(told.logits + fitted.shift, told.accepted, told.known)
    )
    few = told.where(torch.arange(len(told)) < 60)
    fitted = Scaling.fit(few.logits, few.accepted, few.known)
    assert fitted.slot_shifts.abs().max() < 0.25
    unreached = Scaling.fit(told.logits, told.accepted.clamp(max=0), told.known.clamp(max=1))
    assert unreached.slot_shifts[1:].tolist() == [0.0, 0.0]


def test_only_decided_proposals_count() -> None:
    """Behind a rejection, and behind what a round tells, logits are anything."""
    traces = planted_traces([1.0] * 3, 4000, shift=-0.5)
    expected = fit_shift(traces.logits, traces.accepted, traces.known)
    spoilt = traces.logits.clone()
    spoilt[torch.arange(3) > traces.accepted[:, None]] = 9.0
    assert fit_shift(spoilt, traces.accepted, traces.known) == expected
    known = traces.known.clamp(max=2)
    spoilt[:, 2] = 9.0
    two = fit_shift(traces.logits[:, :2], traces.accepted, traces.known)
    assert fit_shift(spoilt, traces.accepted, known) == pytest.approx(two, abs=1e-9)


@pytest.mark.parametrize("accepted", [0, 2])
def test_outcomes_that_all_agree_shift_nothing(accepted) -> None:
    rounds = torch.full((50,), accepted)
    assert fit_shift(torch.randn(50, 2), rounds, torch.full((50,), 2)) == 0.0
    assert fit_shift(torch.zeros(0, 2), rounds[:0], rounds[:0]) == 0.0
