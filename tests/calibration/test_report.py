"""Scores by hand, against other definitions, and on planted miscalibration."""

import pytest
import torch

from dspark_train.calibration import Scaling, prefix_confidence
from dspark_train.calibration.alternatives import isotonic, platt
from dspark_train.calibration.diagram import reliability_figure
from dspark_train.calibration.report import reliability, report, sampling_noise, scores
from tests.calibration.planted import planted_traces


def test_scores_by_hand() -> None:
    product = torch.tensor([0.9, 0.9, 0.2, 0.5])
    passed = torch.tensor([True, False, False, True])
    found = scores(product, passed)
    assert found.rounds == 4
    assert found.ece == pytest.approx((0.8 + 0.2 + 0.5) / 4)
    # of the pairs (stands, falls): (.9, .9) half, (.9, .2), (.5, .2) right, (.5, .9) wrong
    assert found.auc == pytest.approx(2.5 / 4)
    assert found.brier == pytest.approx((0.01 + 0.81 + 0.04 + 0.25) / 4)
    assert (found.predicted, found.observed) == pytest.approx((0.625, 0.5))
    assert scores(product, torch.ones(4).bool()).auc is None


def test_noise_is_what_calibrated_products_show() -> None:
    product = torch.rand(400, generator=torch.Generator().manual_seed(1))
    noise = sampling_noise(product)
    # 15 bins, E|Bernoulli mean - p| = sqrt(2 p (1 - p) / (π n)), over p uniform
    assert noise == pytest.approx((2 / 3.1416 * 15 / 400) ** 0.5 * 3.1416 / 8, rel=0.1)
    assert sampling_noise(product.repeat(16)) == pytest.approx(noise / 4, rel=0.15)
    assert sampling_noise(torch.ones(50)) == 0


def test_scaling_brings_every_slot_to_one_percent_on_fresh_rounds() -> None:
    """5,000 rounds to report on; the first slot is ranked as before, no other worse."""
    traces = planted_traces([2.5, 2.0, 0.6], 10_000)
    fit, fresh = traces.halves()
    rounds = (fit.logits, fit.accepted, fit.known)
    scaling = Scaling.fit(*rounds)
    entries = report(fit, fresh, scaling, scaling.without_slots(*rounds))
    for entry in entries:
        before, after = entry["before"], entry["after"]
        assert before["ece"] > 0.03
        assert after["ece"] < 0.01 + after["noise"]
        assert abs(after["predicted"] - after["observed"]) < 0.02
        assert after["auc"] >= before["auc"] - (entry["slot"] > 0) * 0.005
        assert after["brier"] < before["brier"]
        assert entry["shared"]["ece"] < 0.01 + entry["shared"]["noise"]
        assert entry["isotonic"]["ece"] < before["ece"]
        assert entry["platt"]["ece"] < before["ece"]
    assert [e["slot"] for e in entries] == [0, 1, 2]


def test_a_slot_nobody_reached_has_no_scores() -> None:
    traces = planted_traces([1.0, 1.0], 50)
    traces.known[:] = 1
    traces.accepted.clamp_(max=1)
    entries = report(*traces.halves(), Scaling.none(2), Scaling.none(2))
    assert "after" in entries[0]
    assert "after" not in entries[1]
    reliability_figure(traces, Scaling.none(2))


def test_alternatives_mend_what_no_temperature_can() -> None:
    """Acceptance that has nothing to do with the logits' scale, but falls with them."""
    product = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    truth = 0.3 + 0.4 * product**3
    passed = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) < truth
    assert (isotonic(product, passed)(product) - truth).abs().mean() < 0.02
    assert (platt(product, passed)(product) - truth).abs().mean() < 0.06
    assert platt(product, torch.ones(20_000).bool())(product[:2]).tolist() == [1.0, 1.0]


def test_reliability_counts_every_round() -> None:
    traces = planted_traces([1.0], 3000)
    product = prefix_confidence(traces.logits, torch.ones(1))[:, 0]
    rows = reliability(product, traces.accepted > 0)
    assert sum(count for *_, count in rows) == 3000
    assert all(abs(p - o) < 5 * (0.25 / count) ** 0.5 for p, o, count in rows)


def test_the_diagram_is_a_picture(tmp_path) -> None:
    traces = planted_traces([2.0] * 5, 300)
    reliability_figure(traces, Scaling(-0.5, torch.zeros(5), torch.full((5,), 2.0))).savefig(
        tmp_path / "r.png", format="png"
    )
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
