"""Costs follow what rounds take, and policies follow them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.running_costs import LOOK, PAUSE, RunningCosts
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Scheduled, make_scheduler
from dspark_train.decoding.stats import Round, Seconds

SIZES = (1, 2, 4, 8, 16, 32)
TABLE = CostTable(SIZES, (0,), ((0.1, 0.1, 0.11, 0.12, 0.14, 0.18),), (1, 4), (0.03, 0.04))


def learnt(real, rounds: int = 200, sizes=(4, 6, 8, 12), noise: float = 0.0) -> CostTable:
    """The table after rounds whose seconds are `real(tokens)`."""
    costs, dice = RunningCosts(TABLE), np.random.default_rng(0)
    for turn in range(rounds):
        tokens = sizes[turn % len(sizes)]
        costs.observe(tokens, 0.0, real(tokens) * np.exp(noise * dice.standard_normal()))
    return costs.corrected()


def test_a_machine_that_is_slower_is_slower_at_every_size() -> None:
    found = learnt(lambda tokens: 3 * TABLE.verify_seconds(32)[tokens], sizes=(4, 8, 16))
    assert found.verify_seconds(32) == pytest.approx(3 * TABLE.verify_seconds(32), rel=0.01)
    assert found.draft_seconds == TABLE.draft_seconds  # nothing was drafted


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_served_sizes_get_the_price_they_have(noise: float) -> None:
    found = learnt(lambda tokens: 0.1 + 0.02 * tokens, sizes=(4, 8, 16), noise=noise)
    real = [0.1 + 0.02 * tokens for tokens in (4, 8, 16)]
    assert found.verify_seconds(32)[[4, 8, 16]] == pytest.approx(real, rel=0.06)


def test_an_interrupted_round_is_no_news_about_its_size() -> None:
    for bad in (0, 25):
        costs = RunningCosts(TABLE)
        for turn in range(50):
            costs.observe(8, 0.0, 60.0 if turn == bad else 0.12)
        assert costs.corrected().verify_seconds(8)[8] == pytest.approx(0.12, rel=0.05)


def test_a_first_draft_that_took_long_is_forgotten_without_another_one() -> None:
    """Who finds drafting dear drafts no more, so time alone must bring it back."""
    costs = RunningCosts(TABLE)
    costs.observe_drafting(4, 7, 7, 4.0)
    assert costs.corrected().draft_seconds[1] == pytest.approx(0.08)
    for _ in range(1500):
        costs.observe(4, 0.0, 0.11)
    assert costs.corrected().draft_seconds[1] < 0.05


def test_unequal_rounds_are_not_taken_for_dear_sizes() -> None:
    """They take longer, which the table knows; what it says of sizes stays."""
    costs = RunningCosts(replace(TABLE, uneven=1.25))
    for turn in range(200):
        uneven = turn % 2 == 0
        costs.observe(8, 0.0, 0.12 * (1.25 if uneven else 1.0), uneven)
    found = costs.corrected()
    assert found.verify_seconds(32)[8] == pytest.approx(0.12, rel=1e-3)
    assert found.uneven == 1.25


def test_what_was_seen_long_ago_is_forgotten() -> None:
    """A size that nobody took since goes back to what its neighbours say."""
    costs = RunningCosts(TABLE)
    for _ in range(50):
        costs.observe(16, 0.0, 1.4)
    for _ in range(9000):
        costs.observe(4, 0.0, 0.11)
    assert costs.corrected().verify_seconds(16)[16] == pytest.approx(0.14, rel=0.05)


def test_drafting_has_a_price_of_its_own() -> None:
    costs = RunningCosts(TABLE)
    for _ in range(50):
        costs.observe_drafting(4, 7, 7, 0.08)
    found = costs.corrected()
    assert found.draft_seconds == pytest.approx((0.06, 0.08), rel=0.02)
    assert found.verify_seconds(32) == pytest.approx(TABLE.verify_seconds(32), rel=0.01)
    assert RunningCosts(CostTable.from_steps_per_second((1.0,))).corrected().draft_seconds == ()


def test_a_correction_is_due_now_and_then() -> None:
    costs = RunningCosts(TABLE)
    costs.observe(1, 0.0, PAUSE / 2)
    assert not costs.due()
    costs.observe(1, 0.0, PAUSE)
    assert costs.due()
    assert not costs.due()


def test_smaller_rounds_are_tried_often_at_first_and_rarely_later() -> None:
    costs = RunningCosts(TABLE)
    tried = {turn: costs.trial(turn, 7) for turn in range(4 * LOOK)}
    assert [turn for turn, width in tried.items() if width == 0] == [1, 4, 16, 2 * LOOK]
    assert [turn for turn, width in tried.items() if width == 3] == [2, 8, 32, LOOK, 3 * LOOK]
    assert sum(width is None for width in tried.values()) == 4 * LOOK - 9


FLAT = CostTable(SIZES, (0,), ((0.1, 0.1, 0.1, 0.105, 0.11, 0.12),), (1, 4), (0.005, 0.005))


def serve(scheduler: Scheduled, real, rounds: int = 400) -> float:
    """Tokens per second of four requests, in the second half; seconds are `real(tokens)`.

    A draft stands with probability 0.6; confidences vary about that.
    """
    requests = [Request([1, 2], SamplingSettings(), 9000) for _ in range(4)]
    dice, tokens, seconds = np.random.default_rng(0), 0, 0.0
    for turn in range(rounds):
        drafted = scheduler.limits(requests)
        chances = np.clip(0.6 + 0.2 * dice.standard_normal((4, 3)), 0.05, 0.95)
        stands = (dice.random((4, 3)) < chances).cumprod(1).astype(bool)
        logits = torch.from_numpy(np.log(chances / (1 - chances)))
        proposals = [
            Proposal([1] * n, None, row[:n]) if n else Proposal()
            for n, row in zip(drafted, logits, strict=True)
        ]
        admitted = scheduler.schedule(requests, proposals)
        took = real(sum(admitted) + 4)
        spent = Seconds(verify=took / 4, draft=0.005 * bool(sum(drafted)) / 4)
        happened = []
        for n, row in zip(admitted, stands, strict=True):
            accepted = int(row[:n].sum())
            judged = min(accepted + 1, n)
            happened.append(Round(n, accepted, judged, accepted + 1, None, spent))
        scheduler.observe(requests, happened)
        if turn >= rounds // 2:
            tokens += sum(one.committed for one in happened)
            seconds += took + spent.draft * 4
    return tokens / seconds


# prefix and capacity draft whole proposals always; and prefix stops before what looks like a cliff
@pytest.mark.parametrize(
    ("name", "share"), [("prefix", 0.88), ("capacity", 0.92), ("columns", 0.98), ("auto", 0.98)]
)
@pytest.mark.parametrize("slope", [0.0, 0.01, 0.02])
def test_policies_follow(name: str, share: float, slope: float) -> None:
    """The table says that drafts are nearly free; in truth each has its price."""

    def real(tokens: int) -> float:
        return float(FLAT.verify_seconds(32)[tokens] + slope * (tokens - 4))

    fixed = max(serve(make_scheduler(f"fixed:{n}", 3), real) for n in range(4))
    believing, following = (
        serve(make_scheduler(name, 3, FLAT, padded=False, follow=follow), real)
        for follow in (False, True)
    )
    assert following > share * fixed
    assert following > (1.3 if slope == 0.02 else 0.98) * believing
