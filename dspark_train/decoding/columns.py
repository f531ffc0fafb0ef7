"""A policy for an engine that pads: every request is verified to the same slot.

Where a pass is as wide as its longest request, a shorter verify length of another one saves
nothing. So what is decided is one width for all, and what is weighed is whole columns of drafts:
`Θ(w) = R (1 + Σ_{k≤w} mean survival) / (seconds of R (1 + w) tokens + seconds to draft)`.
Everything rests on rounds that are over, which is lawful by itself. A single request is as wide as
itself, so Algorithm 1 decides about it.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dspark_train.decoding.cost_hull import convex
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Drafts, Prefix, Waiting
from dspark_train.decoding.survival import survival

# least weight of the last round in the running means, rounds without drafts until they are tried,
# and rounds after which one slot more than is verified is drafted, so that the width can grow
WEIGHT, PAUSE, LOOK = 0.1, 24, 4


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
        self.seen = np.zeros(len(temperatures))
        self.alone = Prefix(_alone(costs, len(temperatures)), temperatures)
        self.width, self.paused, self.rounds, self.current = 0, 0, 0, None

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        limits = np.asarray(waiting.limits)
        self.width = self._best(len(limits), waiting.context)
        if len(limits) == 1:
            return limits
        if not self.width:
            return np.minimum(limits, len(self.mean) if self.paused >= PAUSE else 0)
        look = self.rounds % LOOK == 0
        return np.minimum(limits, min(self.width + look, len(self.mean)))

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        if drafts.confidence is None:  # after a pause only verdicts tell
            lengths = np.minimum(drafts.drafted, self.width or len(self.mean))
            self.current = (None, lengths)
            return lengths
        live = survival(drafts.confidence, self.temperatures, drafts.drafted)
        self.current = (live, drafts.drafted)
        if len(live) == 1:  # a pass is as wide as its only request: live confidences decide
            return self.alone.verify_lengths(drafts)
        return np.minimum(drafts.drafted, self.width)

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        self.rounds += 1
        drafted = self.current is not None and self.current[1].any()
        self.paused = 0 if drafted else self.paused + 1
        if not drafted:
            return
        live, reached = self.current
        if live is None:  # there were no confidences: what stood must do
            live = np.arange(len(self.mean)) < accepted[:, None]
        self._learn(live, reached)
        self.current = None

    def price(self, costs: CostTable) -> None:
        self.costs = costs
        self.alone.price(_alone(costs, len(self.mean)))

    def _learn(self, survived: np.ndarray, reached: np.ndarray) -> None:
        """Count survivals `[R, K]` of slots that requests have reached; who is cut off earlier,
        near its end for example, says nothing about the slots behind.

        The first rounds are averaged, so that the optimistic beginning is forgotten at once.
        """
        slots = survived.shape[1]
        rows = np.arange(slots) < reached[:, None]
        count = rows.sum(0)
        self.seen[:slots] += count > 0
        weight = np.maximum(WEIGHT, 1 / np.maximum(self.seen[:slots], 1)) * (count > 0)
        found = (survived * rows).sum(0) / np.maximum(count, 1)
        self.mean[:slots] += weight * (found - self.mean[:slots])
        # a slot that was not reached lately survives no longer than the one before it
        np.minimum.accumulate(self.mean, out=self.mean)

    def _best(self, requests: int, context: float) -> int:
        return int(even_throughput(self.costs, requests, self.mean, context).argmax())


def even_throughput(
    costs: CostTable, requests: int, survival: np.ndarray, context: float = 0.0
) -> np.ndarray:
    """Θ `[K + 1]` over the width of all requests, for their mean survivals `[K]`."""
    slots = len(survival)
    widths = np.arange(slots + 1)
    committed = requests * np.concatenate(([1.0], 1.0 + survival.cumsum()))
    sizes = requests * (1 + widths)
    seconds = costs.verify_seconds(int(sizes[-1]), context)[sizes]
    seconds[1:] += costs.block_seconds(requests, widths[1:], slots)
    return committed / seconds


def _alone(costs: CostTable, slots: int) -> CostTable:
    """Costs of one request, under their hull."""
    return convex(costs, 1, slots + 1)
