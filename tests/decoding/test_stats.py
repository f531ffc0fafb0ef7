"""Counts and rates."""

from typing import Any

import pytest

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.stats import DecodingStats, Round, Seconds
from tests.random_drafter import make_drafter


def round_of(proposed: int, accepted: int, judged: int, committed: int) -> Round:
    return Round(proposed, accepted, judged, committed, None, Seconds(1.0, 0.25, 2.0, 0.5, 0.125))


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
    parts = {"draft": 5.0, "walk": 1.25, "verify": 10.0, "sampling": 2.5, "bookkeeping": 0.625}
    assert stats.seconds == {**parts, "prefill": 0.0}
    assert stats.tokens_per_second == 11 / 19.375


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


@pytest.mark.parametrize("head", ["vanilla", None])
def test_every_second_of_a_round_is_in_its_part(
    random_target, monkeypatch: pytest.MonkeyPatch, head: str | None
):
    """On a clock that only the parts themselves move, each by a length of its own."""
    now = [0.0]
    for module in ("engine", "proposers.block"):
        monkeypatch.setattr(f"dspark_train.decoding.{module}.perf_counter", lambda: now[0])

    def takes(seconds: float, owner: Any, name: str) -> None:
        inside = getattr(owner, name)

        def slow(*args: Any, **more: Any) -> Any:
            now[0] += seconds
            return inside(*args, **more)

        monkeypatch.setattr(owner, name, slow)

    target = random_target()
    proposer = BlockProposer(make_drafter(target, head=head), target.head)
    engine = Engine(target, proposer, rows=2)
    requests = [Request([1, 2, 3], SamplingSettings(), 20) for _ in range(2)]
    engine.add(requests)
    takes(1.0, proposer, "_block")
    takes(2.0, proposer, "observe")
    takes(4.0, proposer, "_walk")
    takes(8.0, target, "forward")
    takes(16.0, engine, "decide")
    takes(32.0, engine.scheduler, "schedule")
    takes(32.0, requests[1], "commit")
    expected = Seconds(draft=1.5, walk=2.0, verify=4.0, sampling=8.0, bookkeeping=32.0)
    assert [one.seconds for one in engine.step()] == [expected, expected]
