"""The policy for those who do not want to choose: drafts where they pay, equally many if that pays.

A pass whose requests read different numbers of tokens takes longer than one of as many tokens whose
requests read equally many (`CostTable.uneven`). Where confidences tell much, choosing by them
(`Ragged`) is worth it; else one width for all is better, and what no request would have verified is
not drafted. Which of the two decides about a round rests on rounds that are over: each ragged one
tells what one width, chosen before it, would have made of the same confidences.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dspark_train.decoding.columns import even_throughput
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import LAG, Drafts, Ragged, Waiting

# comparisons before the better way is believed, least weight of the last one, and how often a
# ragged round comes while even ones are better: only those compare
ENOUGH, WEIGHT, LOOK = 8, 0.05, 17


class Auto:
    """`Ragged`, or one width for all.

    Args:
        costs: of this engine.
        temperatures: `[K]`.
        lag: of `Capacity`.
    """

    def __init__(self, costs: CostTable, temperatures: Sequence[float], lag: int = LAG) -> None:
        self.ragged, self.turn, self.even = Ragged(costs, temperatures, lag), 0, False
        # by octave of requests: comparisons, and the mean of log Θ ragged / Θ even
        self.compared: dict[int, list[float]] = {}

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        self.waiting, limits = waiting, np.asarray(waiting.limits)
        requests = len(limits)
        self.survival = self.ragged.difficulty.survival(waiting.ids)
        self.costs = self.ragged.hull(requests)
        if self.ragged.has_cliffs(requests):
            self.costs = self.ragged.costs
        mean = self.survival.mean(0)
        width = int(even_throughput(self.costs, requests, mean, waiting.context).argmax())
        self.equal = np.minimum(limits, width)
        count, gain = self.compared.get(requests.bit_length(), (0, 0.0))
        self.even = requests > 1 and count >= ENOUGH and gain < 0 and self.turn % LOOK > 0
        self.asked = self.equal if self.even else self.ragged.drafted(waiting, self.survival)
        # until something is drafted
        self.lengths = np.zeros(requests, dtype=np.int64)
        self.drafts = Drafts(None, self.lengths)
        return self.asked

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        self.drafts = drafts
        self.lengths = drafts.drafted if self.even else self.ragged.verify_lengths(drafts)
        return np.asarray(self.lengths)

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        # who was made to draft less, or could not more, says nothing about what drafts are worth
        if len(ids) > 1 and not self.even and (self.drafts.drafted == self.asked).all():
            self._compare()
        self.turn += 1
        self.ragged.observe(ids, judged, accepted)

    def price(self, costs: CostTable) -> None:
        self.ragged.price(costs)

    def _compare(self) -> None:
        """What the ragged round that is over was expected to commit per second, and what an even
        one would have been."""
        if self.drafts.confidence is not None:
            live = self.ragged.prefix.survival(self.drafts)
            said = np.arange(live.shape[1]) < self.asked[:, None]
            np.copyto(self.survival[:, : live.shape[1]], live, where=said)
        ragged, even = self._theta(self.lengths, self.asked), self._theta(self.equal, self.equal)
        one = self.compared.setdefault(len(self.asked).bit_length(), [0, 0.0])
        one[0] += 1
        one[1] += max(1 / one[0], WEIGHT) * (np.log(ragged / even) - one[1])

    def _theta(self, lengths: np.ndarray, drafted: np.ndarray) -> float:
        """Expected tokens per second of a round with so many drafts verified and made, `[R]`."""
        (requests, slots), costs = self.survival.shape, self.costs
        verified = np.arange(slots) < lengths[:, None]
        size, drafting = requests + int(verified.sum()), int(np.count_nonzero(drafted))
        seconds = costs.verify_seconds(size, self.waiting.context)[size]
        if lengths.min() < lengths.max():
            seconds *= costs.uneven
        if drafting:
            seconds += costs.block_seconds(drafting, drafted.max(), slots)
        return (requests + self.survival[verified].sum()) / seconds
