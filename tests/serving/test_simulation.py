"""The paper's picture: long verification at light load, shrinking under load, and it pays."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import FirstDrafts
from dspark_train.serving.simulation import flat_then_falling, policy_of, simulate
from tests.serving.simulated_traces import P, mixed_traces

ONES = np.ones(P)
COSTS = flat_then_falling(4000)


def run(name: str, concurrency: int, rounds: int = 250, costs: CostTable = COSTS, tokens: int = 96):
    requests = concurrency + max(20, concurrency * rounds * 3 // tokens)
    return simulate(
        policy_of(name, costs, ONES),
        costs,
        mixed_traces(),
        concurrency=concurrency,
        requests=requests,
        tokens=tokens,
    )


def test_a_fixed_length_by_hand() -> None:
    """τ is 1 + Σ of the survivals, over conversations of equal length; the clock is the curve."""
    traces = mixed_traces()
    costs = CostTable.from_steps_per_second([1.0] * 3 + [0.5] * 100)
    found = simulate(FirstDrafts(3), costs, traces, concurrency=8, requests=400, tokens=64)
    each = 1 + traces.overlap[:, :3].cumprod(-1).sum(-1).view(60, 40).mean(1)
    assert found.tau == pytest.approx(1 / (1 / each).mean().item(), rel=0.05)
    assert found.throughput == pytest.approx(found.tau * 8 * 0.5)
    assert found.per_user == pytest.approx(found.throughput / 8)
    assert found.verify_length == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("name", ["prefix", "capacity", "auto"])
def test_verification_is_long_at_light_load_and_shrinks_under_load(name) -> None:
    lengths = [run(name, concurrency).verify_length for concurrency in (1, 16, 64, 256)]
    assert lengths[0] > 4
    assert lengths[-1] < 0.6 * lengths[0]
    assert all(a > b - 0.2 for a, b in pairwise(lengths))


@pytest.mark.parametrize("concurrency", [1, 16, 64, 256])
def test_auto_is_at_least_as_good_as_every_fixed_length(concurrency) -> None:
    auto = run("auto", concurrency).throughput
    fixed = {n: run(f"fixed:{n}", concurrency).throughput for n in range(P + 1)}
    assert auto > 0.98 * max(fixed.values())
    assert auto > 1.05 * fixed[1]
    if concurrency >= 64:
        assert auto > 1.03 * max(fixed.values())


def test_unequal_passes_take_as_long_as_the_table_says() -> None:
    """And equal ones as long as ever."""
    dear = replace(COSTS, uneven=1.5)
    assert run("fixed:0", 8, costs=dear) == run("fixed:0", 8)
    slowed = run("threshold:0.6", 8, costs=dear).throughput
    assert slowed < 0.75 * run("threshold:0.6", 8).throughput
    assert run("auto", 8, costs=dear).throughput > 0.97 * run("fixed:7", 8, costs=dear).throughput


# a CPU: linear layers cost by the token almost from the first one on
SLOPE = tuple(0.03 + 0.0022 * n for n in range(1, 513))
MEASURED = tuple(2**i for i in range(10))
DRAFT = {
    "draft_rows": MEASURED[:7],
    "draft_seconds": tuple(0.008 + 0.0006 * n for n in MEASURED[:7]),
    "draft_one": tuple(0.006 + 0.0003 * n for n in MEASURED[:7]),
}


@pytest.mark.parametrize(
    ("name", "least"),
    [("auto", {1: 1.02, 4: 1.04, 16: 1.0, 64: 0.99}), ("columns", {4: 0.96, 64: 0.96})],
)
def test_on_a_slope_that_was_measured_at_few_sizes(name, least) -> None:
    """What nobody measured is priced as dear; a policy must not take that for a cliff."""
    true = CostTable(tuple(range(1, 513)), (0,), (SLOPE,), **DRAFT)
    coarse = CostTable(MEASURED, (0,), (tuple(SLOPE[n - 1] for n in MEASURED),), **DRAFT)
    best = {1: (5,), 4: (3,), 16: (0, 1), 64: (0,)}
    for concurrency, ratio in least.items():

        def throughput(policy: str, costs: CostTable, concurrency: int = concurrency) -> float:
            return simulate(
                policy_of(policy, costs, ONES),
                true,
                mixed_traces(),
                concurrency=concurrency,
                requests=2 * concurrency + 60,
                tokens=64,
                padded=policy == "columns",
            ).throughput

        fixed = max(throughput(f"fixed:{n}", true) for n in best[concurrency])
        assert throughput(name, coarse) > ratio * fixed


def test_the_search_gets_past_cliffs_that_stop_the_first_drop() -> None:
    cliffs = flat_then_falling(4000, flat=16, cliff=16, jump=0.3)
    prefix, capacity = (run(name, 24, costs=cliffs) for name in ("prefix", "capacity"))
    assert capacity.throughput > 1.02 * prefix.throughput
    assert capacity.verify_length > prefix.verify_length


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="policy best"):
        policy_of("best", COSTS, ONES)
    with pytest.raises(ValueError, match="expected more than concurrency=4"):
        simulate(FirstDrafts(1), COSTS, mixed_traces(), concurrency=4, requests=4)
    traces = mixed_traces()
    traces.proposed.clamp_(max=2)
    with pytest.raises(ValueError, match="none of them with all 7 drafts"):
        simulate(FirstDrafts(1), COSTS, traces, concurrency=4, requests=40)
