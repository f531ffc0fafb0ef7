"""A shift of confidence logits, then a temperature, for each slot.

Temperatures (`sts.py`) make confidences bolder or more timid, but an even chance stays even. What a
drafter of few answers gets wrong is something else: its head has seen how often drafts stand on the
texts it was trained on, and on new prompts they stand less often. That is a number added to the
logits. What all slots share of it goes into the bias of the confidence head, so that any decoder
which reads the checkpoint has it; what each slot differs by is read by ours.
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
# decided rounds of a slot whose own shift weighs as much as that of all slots
PRIOR = 200


@dataclass(frozen=True)
class Scaling:
    """Confidence of proposal k is `σ((logit + shifts[k]) / temperatures[k])`.

    Attributes:
        shift: what all slots share.
        slot_shifts: `[P]` what each differs by.
        temperatures: `[P]`.
    """

    shift: float
    slot_shifts: torch.Tensor
    temperatures: torch.Tensor

    @classmethod
    def none(cls, proposals: int) -> "Scaling":
        """What leaves the confidences of P proposals as they are."""
        return cls.of(torch.ones(proposals, dtype=torch.float64))

    @classmethod
    def of(cls, temperatures: torch.Tensor) -> "Scaling":
        """Temperatures `[P]` alone."""
        return cls(0.0, torch.zeros_like(temperatures), temperatures)

    @classmethod
    def fit(cls, logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor) -> "Scaling":
        """Shifts, then the temperatures of what is shifted; arguments as `fit_temperatures`."""
        shift = fit_shift(logits, accepted, known)
        slots = torch.zeros(logits.shape[1], dtype=torch.float64)
        for k in range(len(slots)):
            decided = (known > k) & (accepted >= k)
            own = (logits[decided, k : k + 1], accepted[decided] - k, known[decided] - k)
            count = int(decided.sum())
            slots[k] = count / (count + PRIOR) * (fit_shift(*own, default=shift) - shift)
        return cls(shift, slots, fit_temperatures(logits + shift + slots, accepted, known))

    def without_slots(
        self, logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor
    ) -> "Scaling":
        """The shared shift, and the temperatures behind it alone; arguments as for `fit`.

        It is for decoders that divide by temperatures but add no shifts.
        """
        temperatures = fit_temperatures(logits + self.shift, accepted, known)
        return Scaling(self.shift, torch.zeros_like(self.slot_shifts), temperatures)

    @property
    def shifts(self) -> torch.Tensor:
        """What is added to the logits of each slot, `[P]`."""
        return self.shift + self.slot_shifts

    def products(self, logits: torch.Tensor) -> torch.Tensor:
        """Probability `[N, P]` that a proposal and all before it are accepted."""
        return prefix_confidence(logits + self.shifts, self.temperatures)


def fit_shift(
    logits: torch.Tensor, accepted: torch.Tensor, known: torch.Tensor, default: float = 0.0
) -> float:
    """The shift of the likeliest `σ(slope · (logit + shift))`, one for all proposals.

    The slope, which is left to the temperatures, is kept within a factor of `STEEP`.

    Args:
        logits: `[N, P]` confidence logits of N rounds.
        accepted: `[N]` drafts accepted in the round.
        known: `[N]` leading proposals whose outcome the round tells.
        default: the shift where nothing was decided, or always the same.
    """
    slots = torch.arange(logits.shape[1])
    decided = (slots < known[:, None]) & (slots <= accepted[:, None])
    said = logits[decided].double().numpy()
    stands = (slots < accepted[:, None])[decided].numpy()
    if not 0 < stands.sum() < len(stands):
        return default
    fitted = LogisticRegression(C=np.inf).fit(said[:, None], stands)
    slope = float(np.clip(fitted.coef_[0, 0], 1 / STEEP, STEEP))
    low, high = -LARGEST, LARGEST
    for _ in range(60):
        shift = (low + high) / 2
        too_high = torch.from_numpy(slope * (said + shift)).sigmoid().mean() > stands.mean()
        low, high = (low, shift) if too_high else (shift, high)
    return (low + high) / 2
