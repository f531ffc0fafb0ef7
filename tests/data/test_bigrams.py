"""Factors of bigrams: the counted log-odds where rank allows, the best approximation elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from dspark_train.data import bigrams
from dspark_train.data.bigrams import SHARE, bigram_factors

V = 12


def store_of(rows: list[tuple[list[int], list[int]]]) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=lambda n: (
            torch.tensor(rows[n][0], dtype=torch.int32),
            torch.tensor(rows[n][1], dtype=torch.uint8),
        )
    )


def counted(rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """The pairs of all rows, one by one."""
    n = torch.zeros(V, V)
    for ids, mask in rows:
        for i in range(1, len(ids)):
            if mask[i]:
                n[ids[i - 1], ids[i]] += 1
    return n


def some_rows(count: int) -> list[tuple[list[int], list[int]]]:
    torch.manual_seed(0)
    chosen = torch.randint(1, V - 1, (count, 30)).tolist()
    # what the prompt's tokens follow does not count, nor does a first token follow anything
    return [(ids, [1] * 4 + [0] * 6 + [1] * 20) for ids in chosen]


@pytest.mark.parametrize("together", [1, 4, 500])
def test_full_rank_is_the_log_odds_by_hand(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigrams, "TOGETHER", together)
    rows = some_rows(9)
    first, second = bigram_factors(store_of(rows), range(9), V, rank=16)
    assert first.shape == second.shape == (V, 16)
    n = counted(rows)
    p = n.sum(0) / n.sum()
    expected = torch.log1p(torch.where(n > 0, n / p, 0))
    torch.testing.assert_close(first @ second.T, SHARE * expected, rtol=1e-4, atol=1e-4)


def test_low_rank_is_the_best_one_weighted_by_use() -> None:
    rows = some_rows(9)
    first, second = bigram_factors(store_of(rows), range(9), V, rank=3)
    n = counted(rows)
    p, uses = n.sum(0) / n.sum(), n.sum(1)
    weighted = torch.log1p(torch.where(n > 0, n / p, 0)) * uses.sqrt()[:, None]
    left, sizes, right = torch.linalg.svd(weighted)
    best = left[:, :3] * sizes[:3] @ right[:3]
    found = uses.sqrt()[:, None] * (first @ second.T) / SHARE
    torch.testing.assert_close(found, best, rtol=1e-3, atol=1e-3)


def test_only_some_documents_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigrams, "DOCUMENTS", 2)
    rows, state = some_rows(6), torch.get_rng_state()
    few = bigram_factors(store_of(rows), [1, 2, 3, 4], V, rank=4)
    assert torch.equal(torch.get_rng_state(), state)
    same = bigram_factors(store_of(rows), [1, 3], V, rank=4)
    assert all(torch.equal(a, b) for a, b in zip(few, same, strict=True))
