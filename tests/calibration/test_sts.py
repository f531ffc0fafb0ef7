"""Calibration error by hand, and temperatures recovered from planted miscalibration."""

import pytest
import torch

from dspark_train.calibration import (
    expected_calibration_error,
    fit_temperatures,
    prefix_confidence,
)
from tests.calibration.planted import planted_traces


def test_error_by_hand() -> None:
    # two bins: (0.2, 0.2) observed 0 and 1, (0.9) observed 1
    predicted = torch.tensor([0.2, 0.2, 0.9])
    observed = torch.tensor([0.0, 1.0, 1.0])
    expected = (abs(0.4 - 1.0) + abs(0.9 - 1.0)) / 3
    assert expected_calibration_error(predicted, observed).item() == pytest.approx(expected)
    assert expected_calibration_error(predicted[:0], observed[:0]).item() == 0.0


def test_certain_predictions_fall_into_the_last_bin() -> None:
    assert expected_calibration_error(torch.ones(4), torch.ones(4)).item() == 0.0


def planted(temperatures: list[float], rounds: int) -> tuple[torch.Tensor, ...]:
    """Rounds whose conditional acceptance is σ(logit / T_k) for the planted T."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rounds, len(temperatures), generator=generator) * 2 + 1
    chance = (logits / torch.tensor(temperatures)).sigmoid()
    passed = (torch.rand(chance.shape, generator=generator) < chance).cumprod(-1)
    return logits, passed.sum(-1), torch.full((rounds,), len(temperatures))


def test_planted_temperatures_are_recovered() -> None:
    truth = [2.0, 0.5, 1.5]
    fitted = fit_temperatures(*planted(truth, 60_000))
    assert fitted.tolist() == pytest.approx(truth, rel=0.1)


def test_scaling_lowers_the_error_on_fresh_rounds() -> None:
    logits, accepted, known = planted([2.5, 2.5, 2.5], 20_000)
    half = len(logits) // 2
    fitted = fit_temperatures(logits[:half], accepted[:half], known[:half])
    for k in range(3):
        observed = accepted[half:] > k
        before, after = (
            expected_calibration_error(prefix_confidence(logits[half:], t)[:, k], observed).item()
            for t in (torch.ones(3), fitted)
        )
        assert after < 0.02 < before


def test_few_rounds_move_temperatures_little() -> None:
    """Where nothing is wrong, chance alone takes some to 1/8 or to 8: without a pull, 0.64 octaves
    on the mean."""
    away = []
    for seed in range(20):
        traces = planted_traces([1.0] * 4, 300, seed)
        fitted = fit_temperatures(traces.logits, traces.accepted, traces.known)
        away.append(fitted.log2().abs().mean())
    assert torch.stack(away).mean() < 0.4


def test_a_proposal_nobody_reached_keeps_temperature_one() -> None:
    fitted = fit_temperatures(torch.zeros(5, 3), torch.zeros(5).long(), torch.ones(5).long())
    assert fitted[1:].tolist() == [1.0, 1.0]
    assert fit_temperatures(
        torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0).long()
    ).tolist() == [1.0, 1.0]


def test_the_grid_is_refined() -> None:
    """One logit alone: only T = logit / logit(frequency) has no error."""
    logits = torch.full((1000, 1), 2.0)
    passed = (torch.arange(1000) < 790).long()
    fitted = fit_temperatures(logits, passed, torch.ones(1000))
    exact = 2.0 / torch.tensor(0.79).logit().item()
    assert fitted.item() == pytest.approx(exact, rel=2e-3)
