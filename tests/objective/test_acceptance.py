"""Overlap, survival and expected length, by hand."""

import pytest
import torch

from dspark_train.objective import expected_length, overlap, survival


def test_by_hand() -> None:
    draft = torch.tensor([0.5, 0.3, 0.2])
    target = torch.tensor([0.2, 0.3, 0.5])
    assert overlap(draft, target).item() == pytest.approx(0.7)
    acceptance = torch.tensor([0.5, 0.5, 1.0])
    assert survival(acceptance).tolist() == [0.5, 0.25, 0.25]
    assert expected_length(acceptance).item() == 2.0
