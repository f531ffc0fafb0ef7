"""How many drafts of each request enter the target pass (DSpark, section 5).

*Non-anticipation*: whether drafted token k is admitted must not depend on token k or on anything
after it, else verified tokens are no longer the target's (appendix A). The confidence of slot k
depends on the tokens before it, so it may decide about k; the confidence of slot k+1 may not.
Lawful ways: stop at the first drop of Θ, which looks at an extension only after those before it
were admitted; or fix how many are admitted from earlier rounds, and let live confidences only rank.
Requests do not see each other's tokens, so the order among them is free.

Confidences of earlier rounds are lawful if the drafts of this round were drawn with numbers of
their own: a draft that was discarded must not share its number with one drawn later in its place.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_train.decoding.cost_hull import cliffs, convex
from dspark_train.decoding.cost_table import CLIFF, CostTable
from dspark_train.decoding.difficulty import Difficulty
from dspark_train.decoding.survival import fill, first_drop, ranked, survival, throughput

# the schedule of a round is made while the one before it runs, whose confidences are not there yet
LAG = 2


@dataclass(frozen=True)
class Waiting:
    """Requests before they draft.

    Attributes:
        ids: R requests, by names that stay the same from round to round.
        limits: `[R]` drafts that each may have at most.
        context: mean context length.
    """

    ids: Sequence[Hashable]
    limits: np.ndarray
    context: float = 0.0


@dataclass(frozen=True)
class Drafts:
    """What a round may verify.

    Attributes:
        confidence: `[R, K]` logits of the confidence head; None where the proposer has none.
        drafted: `[R]` drafts of each request, at most K.
        context: mean context length.
    """

    confidence: np.ndarray | None
    drafted: np.ndarray
    context: float = 0.0


class Policy(Protocol):
    """Decides every round, in this order. It remembers earlier rounds: one for each engine.

    A round that fails is run again with the same drafts. So nothing of a round may be remembered
    before `observe` says that it is over.
    """

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        """How many tokens each request drafts, `[R]`, none above `waiting.limits`."""

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        """How many of them enter the target pass, `[R]`, none above `drafts.drafted`.

        Raises:
            ValueError: it needs confidences and there are none.
        """

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        """The verdicts `[R]` of the round: drafts whose verdict counts, and accepted ones."""

    def price(self, costs: CostTable) -> None:
        """From now on these are the costs, if it reads any."""


class DraftsAll:
    """The part of a policy that only decides about verifying."""

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        return np.asarray(waiting.limits)

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        pass

    def price(self, costs: CostTable) -> None:
        pass


class FirstDrafts(DraftsAll):
    """The first `length` drafts of every request; no more are made."""

    def __init__(self, length: int) -> None:
        self.length = length

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        return np.minimum(waiting.limits, self.length)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        return np.minimum(drafts.drafted, self.length)


class Threshold(DraftsAll):
    """Drafts up to the first whose own confidence is below `least`, whatever the load."""

    def __init__(self, least: float, temperatures: Sequence[float]) -> None:
        if not 0 <= least <= 1:
            raise ValueError(f"threshold:{least}: expected a probability in [0, 1]")
        self.temperatures = np.asarray(temperatures, dtype=np.float64)
        # σ(x / T) >= least, without the sigmoid
        with np.errstate(divide="ignore"):
            self.bound = np.log(least) - np.log1p(-least)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        logits = confidences(drafts, "threshold")
        fails = ~(logits >= self.bound * self.temperatures[: logits.shape[1]])
        fails |= np.arange(logits.shape[1]) >= drafts.drafted[:, None]
        return np.where(fails.any(1), fails.argmax(1), logits.shape[1])


class Prefix(DraftsAll):
    """Algorithm 1: extensions in descending survival until Θ fails to rise for the first time."""

    def __init__(self, costs: CostTable, temperatures: Sequence[float]) -> None:
        self.costs, self.temperatures = costs, np.asarray(temperatures, dtype=np.float64)

    def price(self, costs: CostTable) -> None:
        self.costs = costs

    def survival(self, drafts: Drafts, name: str = "prefix") -> np.ndarray:
        """Live survivals `[R, K]`."""
        return survival(confidences(drafts, name), self.temperatures, drafts.drafted)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        live = self.survival(drafts)
        return self.admit(live, ranked(live), drafts)

    def admit(self, live: np.ndarray, ranking: np.ndarray, drafts: Drafts) -> np.ndarray:
        """Verify lengths `[R]` for live survivals and their ranking."""
        return fill(live, ranking, first_drop(self.theta(ranking, drafts)))

    def theta(self, ranking: np.ndarray, drafts: Drafts) -> np.ndarray:
        """Θ over how many extensions of `ranking` are admitted."""
        requests, drafting = len(drafts.drafted), int(np.count_nonzero(drafts.drafted))
        speeds = self.costs.steps_per_second(requests + len(ranking), drafts.context, drafting)
        return throughput(ranking, requests, speeds)


class Capacity(DraftsAll):
    """How many are admitted is the best of all for an earlier round; live confidences only rank.

    The search is not stopped by a drop of Θ, so it gets past cliffs. Where the number of requests
    has changed since, the survivals of the earlier round stand for those of now. While there is no
    round old enough, Algorithm 1 decides.

    Args:
        costs: of this engine.
        temperatures: `[K]`.
        lag: how many rounds old the confidences are that fix the capacity, 1 or more.
    """

    def __init__(self, costs: CostTable, temperatures: Sequence[float], lag: int = LAG) -> None:
        if lag < 1:
            raise ValueError(
                f"lag={lag}: expected at least 1, the confidences of a round must not fix its own "
                "capacity"
            )
        self.prefix = Prefix(costs, temperatures)
        self.earlier: deque[tuple[int, np.ndarray]] = deque(maxlen=lag)
        self.current: tuple[int, np.ndarray] | None = None

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        live = self.prefix.survival(drafts, "capacity")
        ranking, requests = ranked(live), len(live)
        ready = len(self.earlier) == self.earlier.maxlen
        before, expected = self.earlier[0] if ready else (0, ranking)
        self.current = (requests, ranking)
        if not before:
            return self.prefix.admit(live, ranking, drafts)
        if before != requests:
            count = round(len(expected) * requests / before)
            expected = expected[np.arange(count) * len(expected) // max(count, 1)]
        return fill(live, ranking, int(self.prefix.theta(expected, drafts).argmax()))

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        if self.current is not None:  # something was drafted
            self.earlier.append(self.current)
            self.current = None

    def price(self, costs: CostTable) -> None:
        self.prefix.price(costs)


class Ragged:
    """Requests that are hard to guess draft shorter or not at all; live confidences do the rest.

    Which drafts are verified says Algorithm 1 on the convex hull of the costs, at the sizes that so
    many requests can have. Where the curve has cliffs there, `Capacity` says it. Without
    confidences, recent verdicts alone decide how much is drafted, and all of it is verified.
    """

    def __init__(self, costs: CostTable, temperatures: Sequence[float], lag: int = LAG) -> None:
        self.costs, self.hulls = costs, {}
        self.capacity = Capacity(costs, temperatures, lag)
        self.prefix, self.cliffs = Prefix(costs, temperatures), cliffs(costs)
        self.difficulty = Difficulty(costs, len(temperatures))

    def draft_lengths(self, waiting: Waiting) -> np.ndarray:
        return self.drafted(waiting, self.difficulty.survival(waiting.ids))

    def drafted(self, waiting: Waiting, expected: np.ndarray) -> np.ndarray:
        """Draft lengths `[R]` for expected survivals `[R, K]`."""
        self.difficulty.price(self.hull(len(expected)))
        return self.difficulty.draft_lengths(expected, np.asarray(waiting.limits), waiting.context)

    def verify_lengths(self, drafts: Drafts) -> np.ndarray:
        if drafts.confidence is None:
            return np.asarray(drafts.drafted)
        # the number of requests and the table decide, so this choice anticipates nothing
        requests = len(drafts.drafted)
        if self.has_cliffs(requests):
            return self.capacity.verify_lengths(drafts)
        self.prefix.price(self.hull(requests))
        return self.prefix.verify_lengths(drafts)

    def observe(self, ids: Sequence[Hashable], judged: np.ndarray, accepted: np.ndarray) -> None:
        self.capacity.observe(ids, judged, accepted)
        self.difficulty.observe(ids, judged, accepted)

    def price(self, costs: CostTable) -> None:
        self.costs, self.hulls = costs, {}
        self.capacity.price(costs)  # where the cliffs are stays: noise looks like cliffs

    def has_cliffs(self, requests: int) -> bool:
        """Whether the costs that so many requests can have are far from their hull."""
        sizes = self.cliffs[requests : requests * (self.difficulty.slots + 1) + 1]
        return bool(sizes.max(initial=0.0) > CLIFF / 2)

    def hull(self, requests: int) -> CostTable:
        """The costs of so many requests, under their hull."""
        if requests not in self.hulls:
            largest = requests * (self.difficulty.slots + 1)
            self.hulls[requests] = convex(self.costs, requests, largest)
        return self.hulls[requests]


def confidences(drafts: Drafts, name: str) -> np.ndarray:
    """The confidence logits.

    Raises:
        ValueError: there are none.
    """
    if drafts.confidence is None:
        raise ValueError(
            f"policy {name} needs confidences, and this proposer gives none: take fixed or auto, "
            "or a drafter with a confidence head"
        )
    return drafts.confidence
