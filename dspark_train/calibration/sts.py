"""Sequential temperature scaling (DSpark, section 4): one temperature per proposal, left to right.

Confidence logits say how likely a proposal is accepted given that those before it were. What a
scheduler uses is their cumulative product, so that is what is calibrated: with the earlier
temperatures fixed, T_k is the value whose product is closest to the observed frequency. On few
rounds many are about as close; of these it is the one nearest to 1.
"""

import torch

from dspark_train.calibration.ece import expected_calibration_error

# powers of two: first 49 values from 1/8 to 8, 1 among them, then twice finer around the best
WIDTH, COARSE, FINE, REFINEMENTS = 3.0, 49, 11, 2
# what a temperature must gain for every power of two away from 1, in standard errors of what passed
PULL = 0.5


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
        `[P]` float64 temperatures; 1 where no round reached the proposal.
    """
    proposals = logits.shape[1]
    temperatures = torch.ones(proposals, dtype=torch.float64)
    product = torch.ones(len(logits), dtype=torch.float64)
    for k in range(proposals):
        seen = known > k
        if seen.any():
            best = _fit_one(logits[seen, k].double(), product[seen], accepted[seen] > k)
            temperatures[k] = best
            product = product * (logits[:, k].double() / best).sigmoid()
    return temperatures


def _fit_one(logits: torch.Tensor, before: torch.Tensor, passed: torch.Tensor) -> float:
    """The temperature of one proposal; `before` is the product up to it, all `[N]`."""
    centre, width, count = 0.0, WIDTH, COARSE
    frequency = passed.double().mean()
    pull = PULL * (frequency * (1 - frequency) / len(logits)).sqrt()
    for _ in range(1 + REFINEMENTS):
        grid = centre + torch.linspace(-width, width, count, dtype=torch.float64)
        # in order of distance from 1: argmin takes the first of equals
        grid = grid[grid.abs().argsort(stable=True)]
        predicted = before[:, None] * (logits[:, None] / 2.0**grid).sigmoid()
        errors = expected_calibration_error(predicted, passed)
        errors += pull * grid.abs()
        centre, width = float(grid[errors.argmin()]), 2 * width / (count - 1)
        count = FINE
    return 2.0**centre
