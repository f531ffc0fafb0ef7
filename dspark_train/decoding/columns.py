"""A policy for an engine that pads: every request is verified to the same slot.

Where a pass is as wide as its longest request, a shorter verify length of another one saves
nothing. So what is decided is one width for all, and what is weighed is whole columns of drafts:
`Θ(w) = R (1 + Σ_{k≤w} mean survival) / (seconds of R (1 + w) tokens + seconds to draft)`.
Everything rests on rounds that are over, which is lawful by itself.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Drafts, Waiting
from dspark_train.decoding.survival import survival

# weight of the last round in the running means, and rounds without drafts until they are tried
WEIGHT, PAUSE = 0.15, 24


class Columns:
    """The width that is best for the running mean survivals.

    Args:
        costs: of this engine.
        temperatures: `[K]`.
    """

    def __init__(self, costs: CostTable, temperatures: Sequence[float]) -> None:
        self.costs, self.temperatures = costs, np.asarray(temperatures, dtype=np.float64)
        # optimistic at first, else nothing would be drafted and learnt
        self.mean = np.cumprod(np.full(len(temperatures), 0.9))
        self.width, self.paused, self.current = 0, 0, None

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        limits = np.asarray(waiting.limits)
        self.width = self._best(len(limits), waiting.context)
        if self.paused >= PAUSE:
            self.width = len(self.mean)
        # one slot more than is verified, so that the width can grow
        wanted = min(self.width + 1, len(self.mean)) if self.width else 0
        return np.minimum(limits, wanted)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        lengths, live = np.minimum(drafts.drafted, self.width), None
        if drafts.confidence is not None:
            live = survival(drafts.confidence, self.temperatures, drafts.drafted)
        self.current = (live, lengths if live is None else drafts.drafted)
        return lengths

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        self.paused = 0 if self.width else self.paused + 1
        if self.current is None:
            return
        live, reached = self.current
        if live is None:  # there were no confidences: what stood must do
            live = np.arange(len(self.mean)) < accepted[:, None]
        self._learn(live, reached)
        self.current = None

    def _learn(self, survived: np.ndarray, reached: np.ndarray) -> None:
        """Count survivals `[R, K]` of slots that requests have reached; who is cut off earlier,
        near its end for example, says nothing about the slots behind."""
        for k in range(survived.shape[1]):
            rows = reached > k
            if rows.any():
                self.mean[k] += WEIGHT * (float(survived[rows, k].mean()) - self.mean[k])

    def _best(self, requests: int, context: float) -> int:
        slots = len(self.mean)
        widths = np.arange(slots + 1)
        committed = requests * np.concatenate(([1.0], 1.0 + self.mean.cumsum()))
        sizes = requests * (1 + widths)
        seconds = self.costs.verify_seconds(int(sizes[-1]), context)[sizes]
        # one slot more is drafted than verified
        shares = np.minimum(widths[1:], slots - 1) / max(slots - 1, 1)
        drafts = [self.costs.drafting_seconds(requests, share)[requests] for share in (0.0, 1.0)]
        seconds[1:] += drafts[0] + shares * (drafts[1] - drafts[0])
        return int((committed / seconds).argmax())
