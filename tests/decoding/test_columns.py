"""One width for all, where a pass is as wide as its longest request."""

import numpy as np
import pytest

from dspark_train.decoding.columns import Columns
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Drafts, Waiting

K = 4
ONES = (1.0,) * K


def play(policy: Columns, chance: float, rounds: int, requests: int = 8, seed: int = 0):
    """Verified widths of rounds in which every draft stands with this chance."""
    random, ids, widths = np.random.default_rng(seed), list(range(requests)), []
    for _ in range(rounds):
        drafted = policy.draft_lengths(Waiting(ids, np.full(requests, K)))
        logits = np.full((requests, K), np.log(chance / (1 - chance)), dtype=np.float32)
        lengths = policy.verify_lengths(Drafts(logits, drafted))
        assert len(set(lengths.tolist())) == 1
        passed = (random.random((requests, K)) < chance).cumprod(1).sum(1)
        policy.observe(ids, lengths, np.minimum(passed, lengths))
        widths.append(int(lengths[0]))
    return widths


def best_width(costs: CostTable, chance: float, requests: int) -> int:
    def theta(w: int) -> float:
        committed = requests * sum(chance**k for k in range(w + 1))
        return committed / costs.verify_seconds(requests * (K + 1))[requests * (1 + w)]

    return max(range(K + 1), key=theta)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("flat", [8, 16, 24, 40])
def test_the_width_is_the_best_one(chance, flat) -> None:
    seconds = tuple(1.0 + max(0, n - flat) / 20 for n in range(1, 41))
    costs = CostTable(tuple(range(1, 41)), (0,), (seconds,))
    widths = play(Columns(costs, ONES), chance, 120)
    assert set(widths[60:]) == {best_width(costs, chance, 8)}


def test_nothing_is_drafted_where_it_does_not_pay_but_tried_again() -> None:
    dear = CostTable((1, 40), (0,), ((1.0, 1.0),), (1, 8), (3.0, 3.0))
    policy = Columns(dear, ONES)
    drafted = []
    real = policy.draft_lengths
    policy.draft_lengths = lambda waiting: drafted.append(real(waiting)) or drafted[-1]
    assert set(play(policy, 0.2, 200)[50:]) == {0}
    tried = [int(lengths.max()) for lengths in drafted[50:]]
    assert 0.02 < np.mean([n == K for n in tried]) < 0.1
    assert set(tried) == {0, K}
    assert np.mean(play(policy, 0.97, 900)[800:]) == K


def test_the_optimistic_beginning_is_forgotten_at_once() -> None:
    """A round that verifies too much at many requests costs as much as many good ones."""
    sizes = tuple(range(1, 41))
    steep = CostTable(sizes, (0,), (tuple(map(float, sizes)),))
    assert play(Columns(steep, ONES), 0.2, 12)[1:] == [0] * 11


def test_a_request_alone_is_verified_by_its_live_confidence() -> None:
    policy, found = Columns(CostTable((1, 5), (0,), ((1.0, 2.0),)), ONES), []
    for logit in (4.0, -4.0) * 20:
        drafted = policy.draft_lengths(Waiting([0], np.array([K])))
        logits = np.full((1, K), logit, dtype=np.float32)
        found.append(int(policy.verify_lengths(Drafts(logits, drafted))[0]))
        policy.observe([0], drafted, drafted)
    assert found[-2:] == [K, 0]


def test_without_confidences_verdicts_must_do() -> None:
    costs = CostTable((1, 40), (0,), ((1.0, 2.0),), (1,), (0.4,))
    policy, ids = Columns(costs, ONES), [0, 1]
    for _ in range(80):
        drafted = policy.draft_lengths(Waiting(ids, np.array([K, K])))
        lengths = policy.verify_lengths(Drafts(None, drafted))
        policy.observe(ids, lengths, np.minimum(lengths, 1))
    assert policy.mean[0] > 0.95
    assert policy.mean[1] < 0.05


def test_long_drafts_that_cost_more_are_weighed() -> None:
    """Verifying is free here; only the walk over the slots is not."""
    flat = {"tokens": (1, 40), "contexts": (0,), "seconds": ((1.0, 1.0),), "draft_rows": (1, 8)}
    cheap = CostTable(**flat, draft_seconds=(0.1, 0.1), draft_one=(0.1, 0.1))
    dear = CostTable(**flat, draft_seconds=(1.25, 1.25), draft_one=(0.05, 0.05))
    assert set(play(Columns(cheap, ONES), 0.6, 100)[60:]) == {K}
    assert set(play(Columns(dear, ONES), 0.6, 100)[60:]) == {1}
