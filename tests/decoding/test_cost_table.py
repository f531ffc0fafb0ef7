"""Costs are interpolated without promising what nobody measured."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dspark_train.decoding.cost_measurement import measure_costs
from dspark_train.decoding.cost_table import CostTable


def table(tokens=(1, 4, 8), seconds=(1.0, 1.05, 3.0), **rest) -> CostTable:
    return CostTable(tokens, (0,), (seconds,), **rest)


def test_slopes_are_interpolated_and_cliffs_priced_as_dear() -> None:
    seconds = table().verify_seconds(8)
    slope = [1.0, 1.0 + 0.05 / 3, 1.0 + 0.1 / 3, 1.05]
    assert seconds[1:].tolist() == pytest.approx([*slope, 3.0, 3.0, 3.0, 3.0])
    # a larger batch may be faster; between the two it is not promised
    falling = table((1, 4), (2.0, 1.0)).verify_seconds(4)
    assert falling[1:].tolist() == [2.0, 2.0, 2.0, 1.0]


def test_what_was_measured_is_kept_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    sizes = tuple(sorted(random.choice(200, 40, replace=False) + 1))
    cost = tuple(random.uniform(0.5, 2.0, 40))
    assert table(sizes, cost).verify_seconds(200)[list(sizes)].tolist() == list(cost)


def test_beyond_the_measured_sizes() -> None:
    assert table((2, 4), (1.0, 1.0)).verify_seconds(1).tolist() == [1.0, 1.0]
    assert table((2, 4), (1.0, 1.0)).verify_seconds(8)[4:].tolist() == [1.0, 1.25, 1.5, 1.75, 2.0]


def test_context_is_interpolated_linearly() -> None:
    costs = CostTable((1, 2), (0, 100), ((1.0, 1.0), (3.0, 5.0)))
    assert costs.verify_seconds(2, 50).tolist() == [2.0, 2.0, 3.0]
    assert costs.verify_seconds(2, 1000).tolist() == [3.0, 3.0, 5.0]


def test_drafting_is_part_of_the_step() -> None:
    costs = table((1, 2), (1.0, 1.0), draft_rows=(1, 2), draft_seconds=(0.5, 0.52))
    assert costs.steps_per_second(2).tolist() == [1.0, 1.0, 1.0]
    assert costs.steps_per_second(2, drafting=1)[1] == pytest.approx(1 / 1.5)
    assert costs.drafting_seconds(4).tolist() == pytest.approx([0.0, 0.5, 0.52, 0.78, 1.04])


def test_json_and_csv(tmp_path) -> None:
    costs = CostTable((1, 4), (0, 64), ((1.0, 2.0), (1.5, 2.5)), (1,), (0.25,), uneven=1.25)
    costs.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == costs
    (tmp_path / "costs.csv").write_text("tokens,steps_per_second\n2,0.5\n1,1\n3,0.45\n")
    assert CostTable.load(tmp_path / "costs.csv").tokens == (1, 2, 3)
    speeds = CostTable.load(tmp_path / "costs.csv").steps_per_second(3)
    assert speeds[1:].tolist() == pytest.approx([1, 0.5, 0.45])
    assert CostTable.from_steps_per_second((1, 0.5)).seconds == ((1.0, 2.0),)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "tokens,seconds\n1,fast\n", "fast"),
        ("a.csv", "size,seconds\n1,2\n", "tokens"),
        ("a.csv", "tokens,seconds\n1,0\n", "positive"),
        ("a.csv", "tokens,context,seconds\n1,0,1\n2,5,1\n", "tokens"),
        ("a.json", "[1]", "expected JSON"),
        ("a.json", '{"tokens": [1], "contexts": [0], "seconds": [[1]], "uneven": 0}', "uneven"),
        ("a.json", '{"tokens": [1], "contexts": [0], "seconds": [[1]], "uneven": "1"}', "a.json"),
        ("a.json", '{"tokens": [2, 1], "contexts": [0], "seconds": [[1, 1]]}', "ascending"),
        ("a.json", '{"tokens": [1], "contexts": [0], "seconds": [[1, 1]]}', "expected 1"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path, name, text, message) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        CostTable.load(tmp_path / name)
    assert name in str(caught.value)


class Machine:
    """A machine whose time is counted, not measured."""

    def __init__(self, seconds) -> None:
        self.now, self.seconds, self.steps = 0.0, seconds, 0

    def step(self, tokens: int, context: int = 0) -> float:
        taken = self.seconds(tokens) + 1e-5 * context
        self.now += taken
        self.steps += 1
        return taken

    def clock(self) -> float:
        return self.now


def test_a_cliff_is_located_to_the_token() -> None:
    machine = Machine(lambda tokens: 0.001 if tokens < 37 else 0.002)
    costs = measure_costs(machine.step, max_tokens=100, budget=1.0, clock=machine.clock)
    seconds = costs.verify_seconds(100)
    assert seconds[36] == pytest.approx(0.001)
    assert seconds[37] == pytest.approx(0.002)
    assert machine.now < 1.1


def test_without_time_a_cliff_is_priced_early() -> None:
    machine = Machine(lambda tokens: 0.001 if tokens < 37 else 0.002)
    costs = measure_costs(machine.step, max_tokens=100, budget=0.0, clock=machine.clock)
    seconds = costs.verify_seconds(100)
    assert (seconds[32], seconds[33]) == (pytest.approx(0.001), pytest.approx(0.002))
    true = np.array([machine.seconds(n) for n in range(101)])
    assert (seconds >= true - 1e-9).all()


def test_one_slow_run_does_not_move_the_table() -> None:
    machine = Machine(lambda tokens: 0.5 if machine.steps == 25 else 0.001)
    costs = measure_costs(machine.step, max_tokens=16, budget=1.0, clock=machine.clock)
    assert costs.verify_seconds(16).tolist() == pytest.approx([0.001] * 17)


@pytest.mark.parametrize(("ratios", "expected"), [((1.2, 9.0, 1.1), 1.2), ((0.9, 0.8, 1.1), 1.0)])
def test_unequal_passes_are_measured_by_their_median(ratios, expected) -> None:
    """Which is never below one: a pass does not get faster by it."""
    machine, turns = Machine(lambda tokens: 0.001), itertools.cycle(ratios)
    uneven = lambda: next(turns)  # noqa: E731
    costs = measure_costs(
        machine.step, max_tokens=4, uneven=uneven, budget=0.01, clock=machine.clock
    )
    assert costs.uneven == expected


def test_drafts_between_one_and_all_are_priced_linearly() -> None:
    costs = table((1, 2), (1.0, 1.0), draft_rows=(1, 2), draft_seconds=(0.5, 0.6))
    assert costs.block_seconds(2, np.array([1, 4]), 4).tolist() == [0.6, 0.6]
    costs = replace(costs, draft_one=(0.2, 0.3))
    assert costs.block_seconds(2, np.array([1, 2, 4]), 4) == pytest.approx([0.3, 0.4, 0.6])
    assert costs.block_seconds(1, 1, 1) == pytest.approx(0.2)


def test_contexts_and_drafts_are_measured() -> None:
    machine = Machine(lambda tokens: 0.001)
    costs = measure_costs(
        machine.step,
        max_tokens=4,
        contexts=(0, 100),
        draft=lambda rows, whole: machine.step(rows, 100 * whole),
        max_rows=3,
        budget=0.1,
        clock=machine.clock,
    )
    assert costs.verify_seconds(4, 100).tolist() == pytest.approx([0.002] * 5)
    assert costs.draft_rows == (1, 2, 3)
    assert costs.draft_one == pytest.approx([0.001] * 3)
    assert costs.draft_seconds == pytest.approx([0.002] * 3)
    assert float(costs.block_seconds(2, 4, 7)) == pytest.approx(0.0015)
