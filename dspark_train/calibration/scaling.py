"""One number for all confidence logits, then a temperature for each slot.

Temperatures (`sts.py`) make confidences bolder or more timid, but an even chance stays even. What a
drafter of few answers gets wrong is something else: its head has seen how often drafts stand on the
texts it was trained on, and on new prompts they stand less often, everywhere. That is one number,
added to every logit. So it goes into the bias of the confidence head, and any decoder that reads
the checkpoint has it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from dspark_train.calibration.sts import fit_temperatures, prefix_confidence

# how far the slope may be from 1, either way: decoders that do not read the temperatures get the
# shift alone, and where the slope is far from 1 it would mislead them
STEEP = 4.0
# a shift beyond makes all certain
LARGEST = 20.0


@dataclass(frozen=True)
class Scaling:
    """Confidence of proposal k is `σ((logit + shift) / temperatures[k])`, temperatures `[P]`."""

    shift: float
    temperatures: torch.Tensor

    @classmethod
    def none(cls, proposals: int) -> "Scaling":
        """What leaves the confidences of P proposals as they are."""
        return cls(0.0, torch.ones(proposals, dtype=torch.float64))

    @classmethod
    def fit(cls, logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor) -> "Scaling":
        """The shift, then the temperatures of what is shifted; arguments as `fit_temperatures`."""
        shift = fit_shift(logits, accepted, known)
        return cls(shift, fit_temperatures(logits + shift, accepted, known))

    def products(self, logits: torch.Tensor) -> torch.Tensor:
        """Probability `[N, P]` that a proposal and all before it are accepted."""
        return prefix_confidence(logits + self.shift, self.temperatures)


def fit_shift(logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor) -> float:
    """The shift of the likeliest `σ(slope · (logit + shift))`, one for all proposals.

    The slope, which is left to the temperatures, is kept within a factor of `STEEP`.

    Args:
        logits: `[N, P]` confidence logits of N rounds.
        accepted: `[N]` drafts accepted in the round.
        known: `[N]` leading proposals whose outcome the round tells.

    Returns:
        0 where nothing was decided, or always the same.
    """
    slots = torch.arange(logits.shape[1])
    decided = (slots < known[:, None]) & (slots <= accepted[:, None])
    said = logits[decided].double().numpy()
    stands = (slots < accepted[:, None])[decided].numpy()
    if not 0 < stands.sum() < len(stands):
        return 0.0
    fitted = LogisticRegression(C=np.inf).fit(said[:, None], stands)
    slope = float(np.clip(fitted.coef_[0, 0], 1 / STEEP, STEEP))
    low, high = -LARGEST, LARGEST
    for _ in range(60):
        shift = (low + high) / 2
        too_high = torch.from_numpy(slope * (said + shift)).sigmoid().mean() > stands.mean()
        low, high = (low, shift) if too_high else (shift, high)
    return (low + high) / 2
