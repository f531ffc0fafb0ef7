"""Sequential temperature scaling (DSpark, section 4): one temperature per proposal, left to right.

Confidence logits say how likely a proposal is accepted given that those before it were. What a
scheduler uses is their cumulative product, so that is what is calibrated: with the earlier
temperatures fixed, T_k is the grid value whose product is closest to the observed frequency.
"""

import torch

from dspark_train.calibration.ece import expected_calibration_error

# 161 values from 1/8 to 8, 1 among them
GRID = 2.0 ** torch.linspace(-3, 3, 161, dtype=torch.float64)


def prefix_confidence(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probability `[N, P]` that a proposal and all before it are accepted, from logits `[N, P]`."""
    return (logits.double() / temperatures.double()).sigmoid().cumprod(-1)


def fit_temperatures(
    logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    """Fit the temperatures of P proposals on decoding rounds.

    Args:
        logits: `[N, P]` confidence logits of N rounds (anything beyond what was proposed).
        accepted: `[N]` drafts accepted in the round.
        known: `[N]` leading proposals whose outcome the round tells.

    Returns:
        `[P]` float64 temperatures; 1 where no round reached the proposal. Equal errors go to the
        temperature nearest to 1, so the fit is deterministic.
    """
    proposals = logits.shape[1]
    temperatures = torch.ones(proposals, dtype=torch.float64)
    # candidates in order of distance from 1: argmin takes the first of equals
    grid = GRID[GRID.log().abs().argsort(stable=True)]
    product = torch.ones(len(logits), dtype=torch.float64)
    for k in range(proposals):
        seen = known > k
        if seen.any():
            step = (logits[:, k, None].double() / grid).sigmoid()
            predicted = product[seen, None] * step[seen]
            errors = expected_calibration_error(predicted, (accepted[seen] > k))
            best = int(errors.argmin())
            temperatures[k] = grid[best]
            product = product * step[:, best]
    return temperatures
