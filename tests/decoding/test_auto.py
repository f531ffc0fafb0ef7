"""The better of two ways: unequal drafts chosen by live confidences, or one width for all."""

import numpy as np
import pytest

from dspark_train.decoding.auto import Auto
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Drafts, FirstDrafts, Policy, Ragged, Waiting
from dspark_train.decoding.running_costs import RunningCosts

K, REQUESTS = 4, 6
ONES = (1.0,) * K
SIZES = np.arange(1, REQUESTS * (K + 1) + 1)
LOUD, MUTE, USUAL = (0.15, 0.95), (0.6, 0.6), (0.5, 0.9)


def costs(uneven: float, cliff: int = 99) -> CostTable:
    """Growing with the size, and by half whenever another `cliff` tokens begin."""
    seconds = 1.0 + 0.035 * SIZES if cliff > SIZES[-1] else 1.0 + 0.005 * SIZES
    seconds += 0.5 * ((SIZES - 1) // cliff)
    drafts = ((1, REQUESTS), (0.1, 0.2), (0.1, 0.15))
    return CostTable(tuple(SIZES.tolist()), (0,), (tuple(seconds.tolist()),), *drafts, uneven)


def speed(
    policy: Policy,
    table: CostTable,
    chances: tuple[float, float],
    requests: int = REQUESTS,
    tokens: int = 10**6,
    trials: bool = False,
) -> tuple[float, list[np.ndarray]]:
    """Tokens per second, and the verify lengths, of rounds in which every draft of a request
    stands with one of two chances, by the toss of a coin, as its confidence says.

    Args:
        tokens: of an answer, on the mean.
        trials: smaller rounds now and then, as a server looks for what they cost.
    """
    random, ids = np.random.default_rng(0), list(range(requests))
    committed, seconds, chosen, running = 0, 0.0, [], RunningCosts(table)
    left = random.integers(1, 2 * tokens, requests)
    for turn in range(1200):
        chance = np.repeat(random.choice(chances, (requests, 1)), K, axis=1)
        stands = (random.random((requests, K)) < chance).cumprod(1).sum(1)
        drafted = policy.draft_lengths(Waiting(list(ids), np.minimum(left - 1, K)))
        trial = running.trial(turn, K) if trials else None
        drafted = drafted if trial is None else np.minimum(drafted, trial)
        lengths = np.zeros(requests, dtype=np.int64)
        if drafted.any():
            logits = np.log(chance / (1 - chance)).astype(np.float32)[:, : drafted.max()]
            lengths = policy.verify_lengths(Drafts(logits, drafted))
        accepted = np.minimum(stands, lengths)
        policy.observe(list(ids), np.minimum(accepted + 1, lengths), accepted)
        left -= accepted + 1
        for row in (left <= 0).nonzero()[0]:
            left[row], ids[row] = random.integers(1, 2 * tokens), max(ids) + 1
        if turn < 100:  # policies learn
            continue
        size, drafting = requests + int(lengths.sum()), int(np.count_nonzero(drafted))
        took = table.verify_seconds(size)[size]
        took *= table.uneven if lengths.min() < lengths.max() else 1.0
        took += table.block_seconds(drafting, drafted.max(), K) if drafting else 0.0
        seconds, committed = seconds + took, committed + int((accepted + 1).sum())
        chosen.append(lengths)
    return committed / seconds, chosen


def better(table: CostTable, chances: tuple[float, float], **world) -> float:
    """The speed of `Auto` as a multiple of that of the best fixed length, or of unequal ones."""
    others = [FirstDrafts(width) for width in range(K + 1)] + [Ragged(table, ONES)]
    best = max(speed(policy, table, chances, **world)[0] for policy in others)
    return speed(Auto(table, ONES), table, chances, **world)[0] / best


@pytest.mark.parametrize("chances", [LOUD, MUTE, USUAL])
@pytest.mark.parametrize("uneven", [1.0, 1.1, 1.6])
def test_nobody_is_better(chances, uneven) -> None:
    """Whether confidences tell much or nothing."""
    assert better(costs(uneven), chances) > 0.975


@pytest.mark.parametrize("cliff", [8, 12, 14])
@pytest.mark.parametrize("chances", [(0.8, 0.85), (0.6, 0.7), USUAL])
@pytest.mark.parametrize("uneven", [1.0, 1.3])
def test_nobody_is_better_at_cliffs(cliff, chances, uneven) -> None:
    """The width that ends before a cliff, not one that a smoothed curve would have."""
    assert better(costs(uneven, cliff), chances) > 0.96


@pytest.mark.parametrize("uneven", [1.0, 1.05])
def test_rounds_that_look_for_costs_are_no_comparison(uneven) -> None:
    """In them requests draft less than they were to: that is not what unequal drafts are worth."""
    assert better(costs(uneven), USUAL, trials=True) > 0.975


@pytest.mark.parametrize("tokens", [8, 32])
def test_ends_of_answers_are_weighed(tokens) -> None:
    """Near its end a request drafts less, so that an even round is unequal too."""
    assert better(costs(1.05), USUAL, tokens=tokens) > 0.975


def test_unequal_passes_that_buy_nothing_are_left() -> None:
    """But tried now and then; and one that believes unequal passes cost nothing makes them."""
    table = costs(1.3)
    even = np.mean([np.ptp(n) == 0 for n in speed(Auto(table, ONES), table, (0.5, 0.7))[1]])
    assert 0.9 < even < 1.0
    blind = speed(Auto(costs(1.0), ONES), table, (0.5, 0.7))
    assert speed(Auto(table, ONES), table, (0.5, 0.7))[0] > 1.05 * blind[0]


def test_confidences_that_tell_much_are_followed() -> None:
    table = costs(1.1)
    chosen = speed(Auto(table, ONES), table, LOUD)[1]
    assert np.mean([np.ptp(lengths) > 0 for lengths in chosen]) > 0.9


def test_a_request_alone_is_never_even_with_another() -> None:
    """Its own live confidence decides, which is worth more than any width."""
    table = costs(1.3)
    alone = speed(Auto(table, ONES), table, LOUD, requests=1)[0]
    assert alone > 1.03 * max(speed(FirstDrafts(n), table, LOUD, 1)[0] for n in range(K + 1))
