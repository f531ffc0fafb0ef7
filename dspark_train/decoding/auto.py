"""The policy for those who do not want to choose: drafts where they pay, equally many if that pays.

A pass whose requests read different numbers of tokens takes longer than one of as many tokens whose
requests read equally many (`CostTable.uneven`). Where confidences tell much, choosing by them
(`Ragged`) is worth it; else one width for all is better, and what no request would have verified is
not drafted. Which of the two decides about a round rests on rounds that are over: each ragged one
tells what the best width would have made of the same confidences.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from dspark_train.decoding.columns import even_throughput
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import LAG, Drafts, Ragged, Waiting

# comparisons before the better way is believed, least weight of the last one, and how often a
# ragged round comes while even ones are better: only those compare
ENOUGH, WEIGHT, LOOK = 8, 0.05, 16


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
        limits = np.asarray(waiting.limits)
        requests, ragged = len(limits), self.ragged
        self.context, self.costs = waiting.context, ragged.hull(requests)
        self.survival = ragged.difficulty.survival(waiting.ids)
        theta = even_throughput(self.costs, requests, self.survival.mean(0), self.context)
        self.width = int(theta.argmax())
        self.lengths = np.zeros(requests, dtype=np.int64)
        self.drafts = Drafts(None, self.lengths)  # until there are some
        count, gain = self.compared.get(requests.bit_length(), (0, 0.0))
        self.even = requests > 1 and count >= ENOUGH and gain < 0 and self.turn % LOOK > 0
        return np.minimum(limits, self.width) if self.even else ragged.draft_lengths(waiting)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        if self.even:
            return np.asarray(drafts.drafted)
        self.drafts, self.lengths = drafts, self.ragged.verify_lengths(drafts)
        return self.lengths

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        if not self.even:
            self._compare()
        self.turn += 1
        self.ragged.observe(ids, judged, accepted)

    def price(self, costs: CostTable) -> None:
        self.ragged.price(costs)

    def _compare(self) -> None:
        """What the ragged round that is over was expected to commit per second, and what an even
        one would have been."""
        (requests, slots), drafted = self.survival.shape, self.drafts.drafted
        if self.drafts.confidence is not None:
            live = self.ragged.prefix.survival(self.drafts)
            said = np.arange(live.shape[1]) < drafted[:, None]
            np.copyto(self.survival[:, : live.shape[1]], live, where=said)
        verified = np.arange(slots) < self.lengths[:, None]
        size, drafting = requests + int(verified.sum()), int(np.count_nonzero(drafted))
        seconds = self.costs.verify_seconds(size, self.context)[size]
        if self.lengths.min() < self.lengths.max():
            seconds *= self.costs.uneven
        if drafting:
            seconds += self.costs.block_seconds(drafting, drafted.max(), slots)
        ragged = (requests + self.survival[verified].sum()) / seconds
        mean = self.survival.mean(0)
        even = even_throughput(self.costs, requests, mean, self.context)[self.width]
        one = self.compared.setdefault(requests.bit_length(), [0, 0.0])
        one[0] += 1
        one[1] += max(1 / one[0], WEIGHT) * (np.log(ragged / even) - one[1])
