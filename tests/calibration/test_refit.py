"""The confidence head on its own prefixes: a planted shift is learnt, noise is left alone."""

import pytest
import torch

from dspark_train.calibration.refit import refit


def planted(shift: float, rows: int = 4000, noise: float = 0.0):
    """Labels σ((w + shift·d)·x + b) of inputs in conversations of 50 rows each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 12, generator=generator) * torch.linspace(0.1, 5, 12)
    weight, direction = torch.randn(2, 12, generator=generator) / torch.linspace(0.1, 5, 12)
    bias = torch.tensor(0.3)
    labels = (x @ (weight + shift * direction) + bias).sigmoid()
    if noise:
        labels = (labels + noise * torch.randn(rows, generator=generator)).clamp(0, 1)
    return x, labels, torch.arange(rows) // 50, weight, bias


def test_a_shift_is_learnt() -> None:
    x, labels, conversation, weight, bias = planted(0.7)
    found = refit(x, labels, conversation, weight, bias)
    assert found.after < found.before - 0.05
    assert found.pull < float("inf")
    predicted = (x @ found.weight + found.bias).sigmoid()
    assert (
        (predicted - labels).abs().mean()
        < 0.02
        < (x @ weight + bias).sigmoid().sub(labels).abs().mean()
    )


def test_few_rows_do_not_spoil_good_weights() -> None:
    x, labels, conversation, weight, bias = planted(0.0, rows=100, noise=0.3)
    found = refit(x, labels, conversation, weight, bias)
    assert found.after <= found.before


def test_one_conversation_is_not_enough() -> None:
    x, labels, _, weight, bias = planted(0.0, rows=10)
    with pytest.raises(ValueError, match="1 conversations with verified drafts"):
        refit(x, labels, torch.zeros(10), weight, bias)
