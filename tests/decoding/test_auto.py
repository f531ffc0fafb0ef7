"""The better of two ways: unequal drafts chosen by live confidences, or one width for all."""

import numpy as np
import pytest

from dspark_train.decoding.auto import Auto
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Drafts, FirstDrafts, Policy, Ragged, Waiting

K, REQUESTS = 4, 6
ONES = (1.0,) * K
SECONDS = tuple(1.0 + 0.035 * n for n in range(1, REQUESTS * (K + 1) + 1))
SIZES = tuple(range(1, len(SECONDS) + 1))
LOUD, MUTE = (0.15, 0.95), (0.6, 0.6)


def costs(uneven: float) -> CostTable:
    return CostTable(SIZES, (0,), (SECONDS,), (1, REQUESTS), (0.1, 0.2), (0.1, 0.15), uneven)


def speed(
    policy: Policy, table: CostTable, chances: tuple[float, float], requests: int = REQUESTS
) -> tuple[float, list[np.ndarray]]:
    """Tokens per second, and the verify lengths, of rounds in which every draft of a request
    stands with one of two chances, by the toss of a coin, as its confidence says."""
    random, ids = np.random.default_rng(0), list(range(requests))
    committed, seconds, chosen = 0, 0.0, []
    for turn in range(600):
        chance = np.repeat(random.choice(chances, (requests, 1)), K, axis=1)
        stands = (random.random((requests, K)) < chance).cumprod(1).sum(1)
        drafted = policy.draft_lengths(Waiting(ids, np.full(requests, K)))
        lengths = np.zeros(requests, dtype=np.int64)
        if drafted.any():
            logits = np.log(chance / (1 - chance)).astype(np.float32)[:, : drafted.max()]
            lengths = policy.verify_lengths(Drafts(logits, drafted))
        accepted = np.minimum(stands, lengths)
        policy.observe(ids, np.minimum(accepted + 1, lengths), accepted)
        if turn < 100:  # policies learn
            continue
        size, drafting = requests + int(lengths.sum()), int(np.count_nonzero(drafted))
        took = table.verify_seconds(size)[size]
        took *= table.uneven if lengths.min() < lengths.max() else 1.0
        took += table.block_seconds(drafting, drafted.max(), K) if drafting else 0.0
        seconds, committed = seconds + took, committed + int((accepted + 1).sum())
        chosen.append(lengths)
    return committed / seconds, chosen


@pytest.mark.parametrize("chances", [LOUD, MUTE])
@pytest.mark.parametrize("uneven", [1.0, 1.1, 1.6])
def test_nobody_is_better(chances, uneven) -> None:
    """Neither the best fixed length nor unequal ones, whether confidences tell much or nothing."""
    table = costs(uneven)
    others = [FirstDrafts(width) for width in range(K + 1)] + [Ragged(table, ONES)]
    best = max(speed(policy, table, chances)[0] for policy in others)
    assert speed(Auto(table, ONES), table, chances)[0] > 0.975 * best


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
