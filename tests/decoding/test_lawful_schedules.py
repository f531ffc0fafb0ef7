"""Law 8 and non-anticipation: under every policy the output is the target's, and an unlawful one
fails the same tests."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from dspark_train.decoding.auto import ENOUGH, Auto
from dspark_train.decoding.columns import Columns
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import (
    Capacity,
    Drafts,
    FirstDrafts,
    Prefix,
    Ragged,
    Threshold,
)
from dspark_train.decoding.survival import fill, ranked
from tests.decoding.scheduled_rounds import World, error, found

TOLERANCE = 1e-9
# falling, with a cliff before 4 tokens that the first drop stops at, and better sizes behind it
JAGGED = CostTable.from_steps_per_second((1.0, 0.9, 0.85, 0.58, 0.6, 0.62, 0.5))
# the price of drafting matters, so that difficulty-aware drafting decides something
DEAR = CostTable(JAGGED.tokens, (0,), JAGGED.seconds, (1, 2), (0.3, 0.9))
FLAT = CostTable.from_steps_per_second((1.0,) * 8)
STEEP = CostTable.from_steps_per_second([0.5**n for n in range(8)])


class Retrospective(Prefix):
    """Unlawful: the best number of extensions for live confidences."""

    def admit(self, live, ranking, drafts):
        return fill(live, ranking, int(self.theta(ranking, drafts).argmax()))


class OneAhead(Threshold):
    """Unlawful: a draft is admitted by the confidence of the one after it."""

    def verify_lengths(self, drafts):
        ahead = np.roll(drafts.confidence, -1, axis=1)
        return ((ahead >= self.bound) & (np.arange(2) < drafts.drafted[:, None])).cumprod(1).sum(1)


class MeanOfBlock(Threshold):
    """Unlawful: all drafts or none, by the mean confidence."""

    def verify_lengths(self, drafts):
        return np.where(drafts.confidence.mean(1) >= self.bound, drafts.drafted, 0)


class RaggedOnRetrospective(Ragged):
    """Unlawful: difficulty-aware drafting is no excuse."""

    def __init__(self, costs, temperatures):
        super().__init__(costs, temperatures)
        self.capacity = Retrospective(costs, temperatures)


class DraftsByLuck(Ragged):
    """Unlawful: what is verified depends on what was drafted and thrown away in this very round."""

    def verify_lengths(self, drafts):
        live = self.capacity.prefix.survival(drafts)
        return np.where(live[:, -1] > live[:, -1].mean(), drafts.drafted, 0)


class Following(Ragged):
    """Lawful: prices follow what became of earlier rounds, as seconds of real ones might."""

    def observe(self, ids, judged, accepted):
        super().observe(ids, judged, accepted)
        self.price(FLAT if accepted.any() else STEEP)


class InTurns(Auto):
    """Lawful: equal widths after a round in which a draft stood, as comparisons might have it."""

    def observe(self, ids, judged, accepted):
        super().observe(ids, judged, accepted)
        self.turn = 1
        self.compared[len(ids).bit_length()] = [ENOUGH, -1.0 if accepted.any() else 1.0]


class WidthOfThisRound(Auto):
    """Unlawful: the width comes from confidences of the drafts that it decides about."""

    def verify_lengths(self, drafts):
        good = drafts.confidence[:, : drafts.drafted.max()] > 0
        return np.minimum(drafts.drafted, good.all(0).sum())


class FollowingTooSoon(Prefix):
    """Unlawful: prices follow the drafts that they decide about."""

    def verify_lengths(self, drafts):
        self.price(FLAT if drafts.confidence[0, -1] > 0 else STEEP)
        return super().verify_lengths(drafts)


ONES = (1.0, 1.0)
LAWFUL = {
    "fixed 0": lambda costs: FirstDrafts(0),
    "fixed 1": lambda costs: FirstDrafts(1),
    "fixed 2": lambda costs: FirstDrafts(2),
    "threshold": lambda costs: Threshold(0.5, (1.5, 0.8)),
    "prefix": lambda costs: Prefix(costs, (1.5, 0.8)),
    "capacity": lambda costs: Capacity(costs, ONES, lag=1),
    "capacity of two rounds ago": lambda costs: Capacity(costs, ONES),
    "ragged": lambda costs: Ragged(costs, ONES, lag=1),
    "auto": lambda costs: Auto(costs, ONES, lag=1),
    "auto, even in turns": lambda costs: InTurns(replace(costs, uneven=1.3), ONES, lag=1),
    "columns": lambda costs: Columns(costs, ONES),
    "ragged, prices follow": lambda costs: Following(costs, ONES, lag=1),
}
UNLAWFUL = {
    "retrospective": lambda costs: Retrospective(costs, ONES),
    "one ahead": lambda costs: OneAhead(0.5, ONES),
    "mean of the block": lambda costs: MeanOfBlock(0.5, ONES),
    "ragged on retrospective": lambda costs: RaggedOnRetrospective(costs, ONES),
    "width of this round": lambda costs: WidthOfThisRound(costs, ONES),
    "drafts by luck": lambda costs: DraftsByLuck(costs, ONES),
    "prices follow too soon": lambda costs: FollowingTooSoon(costs, ONES),
}
TABLES = {"jagged": JAGGED, "dear drafts": DEAR, "flat": FLAT}


@dataclass(frozen=True)
class AppendixA(World):
    """One request, p = (.7, .3), q = (.5, .5); the second slot is sure to stand after token 0."""

    def target(self, request, tokens):
        return np.array([0.7, 0.3])

    def draft(self, request, committed, tokens):
        return np.array([0.5, 0.5])

    def confidence(self, request, committed, tokens):
        if len(tokens) == committed:
            return float(np.log(0.8 / 0.2))
        return 20.0 if tokens[-1] == 0 else -20.0


APPENDIX_SPEEDS = CostTable.from_steps_per_second((1, 0.5, 0.45))


def first_token(policy) -> tuple[float, float]:
    """Distribution of the first token."""
    outputs = found(AppendixA(), policy, 1, 3)
    return tuple(sum(p for (tokens,), p in outputs.items() if tokens[0] == x) for x in (0, 1))


@pytest.mark.parametrize("policy", LAWFUL)
def test_appendix_a(policy) -> None:
    assert first_token(LAWFUL[policy](APPENDIX_SPEEDS)) == pytest.approx((0.7, 0.3), abs=TOLERANCE)


def test_appendix_a_finds_the_unlawful_policy() -> None:
    unlawful = first_token(Retrospective(APPENDIX_SPEEDS, ONES))
    assert unlawful == pytest.approx((0.85, 0.15), abs=1e-6)


@pytest.mark.parametrize("costs", TABLES)
@pytest.mark.parametrize("policy", LAWFUL)
def test_two_requests_get_the_distribution_of_the_target(policy, costs) -> None:
    assert error(World(), LAWFUL[policy](TABLES[costs]), 2, 3) < TOLERANCE


@pytest.mark.parametrize("policy", LAWFUL)
def test_many_rounds_of_one_request(policy) -> None:
    assert error(World(), LAWFUL[policy](JAGGED), 1, 6) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefix", "capacity", "auto"])
def test_three_requests(policy) -> None:
    assert error(World(slots=1), LAWFUL[policy](JAGGED), 3, 3) < TOLERANCE


@pytest.mark.parametrize("policy", UNLAWFUL)
def test_unlawful_policies_are_found(policy) -> None:
    assert error(World(), UNLAWFUL[policy](JAGGED), 2, 3) > 1e-3


@dataclass(frozen=True)
class Forgetful(AppendixA):
    """Three slots; drafts do not depend on what is before them, and the last is sure after 0."""

    slots: int = 3

    def confidence(self, request, committed, tokens):
        return (1.4, 20.0, 20.0 if tokens and tokens[-1] == 0 else -20.0)[len(tokens) - committed]


@pytest.mark.parametrize("policy", [FirstDrafts(1), Prefix(JAGGED, (1.0,) * 3)])
def test_policies_without_memory_allow_one_number_per_position(policy) -> None:
    assert error(Forgetful(), policy, 1, 5, keyed=True) < TOLERANCE


def test_confidences_of_earlier_rounds_need_fresh_numbers() -> None:
    """Old confidences tell what was drafted and discarded; if it comes again, they look ahead."""
    policy = Capacity(CostTable.from_steps_per_second((1, 0.5, 0.33, 0.32)), (1.0,) * 3, lag=1)
    assert error(Forgetful(), policy, 1, 5) < TOLERANCE
    assert error(Forgetful(), policy, 1, 5, keyed=True) > 1e-3


@pytest.mark.parametrize("name", ["threshold", "prefix"])
def test_live_confidences_do_decide(name) -> None:
    """The tests above are of worth only where the drafts of a round change its lengths."""
    policy = LAWFUL[name](JAGGED)
    lengths = {
        tuple(policy.verify_lengths(Drafts(np.array([[x, 1.0], [y, 1.0]]), np.array([2, 2]))))
        for x in (-4.0, 3.0)
        for y in (-4.0, 3.0)
    }
    assert len(lengths) > 1


def test_ties_go_to_the_lower_request() -> None:
    live = np.array([[0.5, 0.5], [0.5, 0.25], [0.5, 0.5]], dtype=np.float32)
    lengths = [fill(live, ranked(live), n).tolist() for n in range(7)]
    assert lengths == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 0, 0],
        [2, 1, 0],
        [2, 1, 1],
        [2, 1, 2],
        [2, 2, 2],
    ]
