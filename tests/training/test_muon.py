"""Muon makes momentum orthogonal, at the price of what the hardware multiplies fast."""

import pytest
import torch
from torch import nn

from dspark_train.training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linspace(1, 10, len(values))  # far from one another
    matrix = u @ values.diag() @ v
    near = orthogonal(1e-3 * matrix, torch.float32)
    assert near.dtype == matrix.dtype
    found = u.T @ near @ v.T
    assert found.diagonal().min() > 0.6
    assert found.diagonal().max() < 1.3
    torch.testing.assert_close(found, found.diagonal().diag(), atol=0.03, rtol=0)


def test_a_step_is_that_of_torch_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(24, 40))
    theirs = nn.Parameter(ours.detach().clone())
    first = Muon([{"params": [ours], "lr": 0.1}], weight_decay=0.01, dtype=torch.bfloat16)
    second = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_no_gradient_no_step() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    Muon([{"params": [parameter], "lr": 0.1}], weight_decay=0.5).step()
    assert torch.equal(parameter, torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    Muon([{"params": [parameter], "lr": 0.1}], weight_decay=0.0).step()
    assert torch.equal(parameter, torch.ones(4, 4))
