"""Does the calibration still hold? A running check per class of requests, and a fit that follows.

A class is whatever may shift on its own: a domain, a sampler. Everything here rests on rounds that
are over, so a scaling that follows is lawful for the rounds to come.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from dspark_train.calibration.scaling import Scaling

logger = logging.getLogger(__name__)

# rounds that the running estimate remembers, as the mean of an exponential
MEMORY = 500
# a gap counts if it is larger than this, and than so many standard errors
GAP, ERRORS = 0.03, 5.0


@dataclass(frozen=True)
class Drift:
    """A class whose predictions of slot `slot` are off: on the mean `predicted`, but `observed`."""

    kind: Hashable
    slot: int
    predicted: float
    observed: float

    def __str__(self) -> str:
        return (
            f"calibration has drifted for {self.kind}: slot {self.slot} stands in "
            f"{100 * self.observed:.1f} % of rounds, predicted were {100 * self.predicted:.1f} %"
        )


@dataclass
class _Class:
    scaling: Scaling
    recent: deque
    # per slot: weight, predicted, observed, variance of the mean
    sums: torch.Tensor
    warned: set = field(default_factory=set)


class DriftMonitor:
    """Watches classes of requests.

    Args:
        start: what all classes start with.
        refit: fit anew on the last rounds of a class whose calibration has drifted.
        window: rounds of a class that a fit looks at; it waits until half of them are there since
            the last one.
    """

    def __init__(self, start: Scaling, *, refit: bool = True, window: int = 2000) -> None:
        self.start, self.refit, self.window = start, refit, window
        self.classes: dict[Hashable, _Class] = defaultdict(self._fresh)

    def scaling(self, kind: Hashable) -> Scaling:
        """Of a class as of now."""
        return self.classes[kind].scaling if kind in self.classes else self.start

    def observe(
        self, kind: Hashable, logits: torch.Tensor, accepted: int, known: int
    ) -> Drift | None:
        """Count one round of a class.

        Args:
            kind: the class.
            logits: `[P]` confidence logits, anything beyond `known`.
            accepted: drafts that stand.
            known: leading drafts of which the round tells.

        Returns:
            What has drifted, once per fit and slot; it is logged as a warning, too. A round whose
            logits are not finite tells nothing.
        """
        if not logits[:known].isfinite().all():
            return None
        one = self.classes[kind]
        product = one.scaling.products(logits[None])[0]
        slots = torch.arange(len(product))
        seen, passed = (slots < known).double(), (slots < accepted).double()
        forget = 1 - seen / MEMORY
        one.sums = one.sums * forget
        one.sums += torch.stack((seen, seen * product, seen * passed, torch.zeros_like(product)))
        one.sums[3] = one.sums[3] * forget + seen * product * (1 - product)
        one.recent.append((logits.clone(), accepted, known))
        found = self._drifted(kind, one)
        if self.refit and one.warned and len(one.recent) >= self.window // 2:
            self._fit(one)
        return found

    def _fresh(self) -> _Class:
        return _Class(
            self.start,
            deque(maxlen=self.window),
            torch.zeros(4, len(self.start.temperatures)).double(),
        )

    def _drifted(self, kind: Hashable, one: _Class) -> Drift | None:
        weight, predicted, observed, variance = one.sums
        gap = (predicted - observed).abs()
        # 1 ≪ weight: a standard error of few rounds says nothing
        off = (gap > GAP * weight) & (gap > ERRORS * variance.sqrt()) & (weight > MEMORY / 10)
        for slot in off.nonzero().flatten().tolist():
            if slot not in one.warned:
                one.warned.add(slot)
                if len(one.warned) == 1:
                    one.recent.clear()  # what came before the shift is not what is to be fitted
                of = weight[slot]
                drift = Drift(kind, slot, float(predicted[slot] / of), float(observed[slot] / of))
                logger.warning("%s", drift)
                return drift
        return None

    def _fit(self, one: _Class) -> None:
        logits, accepted, known = zip(*one.recent, strict=True)
        one.scaling = Scaling.fit(torch.stack(logits), torch.tensor(accepted), torch.tensor(known))
        one.sums = torch.zeros_like(one.sums)
        one.warned.clear()
        one.recent.clear()
