"""Counts and rates."""

import pytest

from dspark_train.decoding.stats import DecodingStats, Round


def round_of(proposed: int, accepted: int, judged: int, committed: int) -> Round:
    return Round(proposed, accepted, judged, committed, None, 1.0, 2.0, 0.5)


def example() -> DecodingStats:
    stats = DecodingStats(requests=1, tokens=1)
    stats.add(round_of(3, 3, 3, 4))  # all accepted
    stats.add(round_of(3, 1, 2, 2))  # rejected at the second
    stats.add(round_of(3, 0, 1, 1))  # rejected at the first
    stats.add(round_of(0, 0, 0, 1))  # proposed nothing
    stats.add(round_of(3, 2, 2, 2))  # an EOS was the second draft
    return stats


def test_rates_follow_from_the_rounds():
    stats = example()
    assert (stats.rounds, stats.tokens, stats.committed) == (5, 11, 10)
    assert stats.tau == 2.0
    assert stats.histogram == [2, 1, 1, 1]
    assert stats.tried == [4, 3, 1]
    assert stats.acceptance_per_slot == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert stats.verified_per_committed == (12 + 5) / 10
    assert stats.seconds == {"draft": 5.0, "verify": 10.0, "other": 2.5, "prefill": 0.0}
    assert stats.tokens_per_second == 11 / 17.5


def test_merged_counts_are_those_of_all_rounds():
    both = example()
    both.add(round_of(5, 4, 5, 5))
    apart = DecodingStats()
    apart.add(round_of(5, 4, 5, 5))
    merged = example()
    merged.merge(apart)
    assert merged == both
    assert merged.to_dict() == both.to_dict()


def test_nothing_counted_gives_zero_rates():
    report = DecodingStats().to_dict()
    assert report["tau"] == report["tokens_per_second"] == report["verified_per_committed"] == 0
    assert report["acceptance_per_slot"] == []
