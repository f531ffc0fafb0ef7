"""How far drafts of each request got lately, and who should draft how much.

Drafting has a price of its own. It is decided before anything is drafted, so it can only rest on
verdicts of earlier rounds, which is lawful by itself.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.survival import committed, cumulative, ranked

# what a round counts after one more; a request without drafts drifts back to the mean of all, which
# drifts back to hope, so that drafts are tried again after some hundreds of rounds
DECAY, DECAY_OF_ALL = 0.9, 0.997
# rounds of the mean request that a request starts with
PRIOR = 3.0
# live confidences differ from what is expected: a draft half as likely as the last one worth
# verifying is still drafted
HOPE = 0.5


class Difficulty:
    """Running acceptance per request and slot; the mean of all for slots nobody has tried.

    Args:
        costs: of the engine.
        slots: K, drafts of a block.
    """

    def __init__(self, costs: CostTable, slots: int) -> None:
        self.costs, self.slots = costs, slots
        # optimistic at first, and again while nothing is drafted, else nothing would be learnt
        self.start = np.tile([[1.0], [0.9]], (1, slots))
        self.all = self.start
        self.ids: list[Hashable] = []
        self.counts = np.zeros((0, 2, slots), dtype=np.float32)

    def price(self, costs: CostTable) -> None:
        """From now on these are the costs."""
        self.costs = costs

    def survival(self, ids: Sequence[Hashable]) -> np.ndarray:
        """Expected survivals, float32 `[R, K]`."""
        counts = self._counts(ids)
        hope = (PRIOR * self.all[1] / self.all[0]).astype(np.float32)
        return cumulative((counts[:, 1] + hope) / (counts[:, 0] + PRIOR))

    def draft_lengths(
        self, expected: np.ndarray, limits: np.ndarray, context: float = 0.0
    ) -> np.ndarray:
        """How many tokens each request should draft, `[R]`, none above `limits`.

        The best of all Θ = (R + Σ a) / (seconds to verify + seconds to draft) says which survival
        is the last one worth its place; what is less than half as likely is not drafted. Slots
        beyond a limit count here, which only matters in the last rounds of a request. Equal
        survivals are worth their places together, or not at all.

        Args:
            expected: `survival` of these requests.
        """
        requests = len(expected)
        ranking = ranked(expected)
        # a request drafts once its first slot is among those admitted
        first = np.sort(expected[:, 0])
        drafting = requests - first.searchsorted(ranking)
        seconds = self.costs.verify_seconds(requests + len(ranking), context)[requests:].copy()
        seconds[1:] += self.costs.drafting_seconds(requests)[drafting]
        best = int((committed(ranking, requests) / seconds).argmax())
        if not best:
            return np.zeros(requests, dtype=np.int64)
        border = ranking[best - 1]
        lengths = np.count_nonzero(expected >= HOPE * border, axis=1)
        return np.minimum(lengths, limits) * (expected[:, 0] >= border)

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        """Count the verdicts `[R]` of a round, and forget requests that are gone."""
        slots = np.arange(self.slots)
        seen = np.stack((slots < judged[:, None], slots < accepted[:, None]), axis=1)
        self.all = DECAY_OF_ALL * self.all + (1 - DECAY_OF_ALL) * self.start + seen.sum(0)
        self.counts = DECAY * self._counts(ids) + seen
        self.ids = list(ids)

    def _counts(self, ids: Sequence[Hashable]) -> np.ndarray:
        """Rounds that judged and that accepted each slot, `[R, 2, K]`; 0 for who is new."""
        if list(ids) == self.ids:
            return self.counts
        place = {name: i for i, name in enumerate(self.ids)}
        known = np.concatenate((self.counts, np.zeros((1, 2, self.slots), dtype=np.float32)))
        return known[[place.get(name, -1) for name in ids]]
