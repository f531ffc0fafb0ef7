"""Expected calibration error (Guo et al. 2017, eq. 3)."""

import math

import torch

BINS = 15


def expected_calibration_error(predicted: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """Mean distance between prediction and frequency over equal-width bins.

    Args:
        predicted: `[N, …]` probabilities.
        observed: `[N]` 0 or 1.

    Returns:
        `[…]`, a number in [0, 1] for every column; 0 where N is 0.
    """
    rest = predicted.shape[1:]
    columns = predicted.reshape(len(predicted), math.prod(rest)).double()
    outcome = observed.double()[:, None]
    bins = (columns * BINS).long().clamp(max=BINS - 1)
    gap = columns.new_zeros(BINS, columns.shape[1]).scatter_add_(0, bins, columns - outcome)
    return (gap.abs().sum(0) / max(1, len(predicted))).view(rest)
