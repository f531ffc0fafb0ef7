"""An engine is measured by running it, and is left as it was."""

import pytest

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer, PlainProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.stats import Round
from dspark_train.serving.costs import engine_costs, layout
from tests.random_drafter import make_drafter


def test_every_size_up_to_a_full_batch_has_a_price(random_target) -> None:
    target = random_target(vocab_size=5, num_layers=2, max_position_embeddings=128)
    engine = Engine(target, BlockProposer(make_drafter(target, 3), target.head), rows=4)
    scheduler = engine.scheduler
    costs = engine_costs(engine, 3, budget=0.3)
    assert {1, 2, 4, 8, 16} <= set(costs.tokens)
    assert costs.tokens[-1] == 16
    assert costs.draft_rows == (1, 2, 4)
    assert min(costs.draft_seconds) > 0
    assert engine.requests == []
    assert engine.scheduler is scheduler
    request = Request([1, 2], SamplingSettings(), 9)
    engine.add([request])
    while request.finish_reason is None:
        engine.step()
    with pytest.raises(ValueError, match="with 1 requests cannot be measured"):
        engine_costs(engine, 3)


def test_unequal_requests_are_measured_where_rows_are_packed(random_target) -> None:
    """Elsewhere a pass is as wide as its widest request, which is another price."""
    target = random_target(vocab_size=5, num_layers=2, max_position_embeddings=128)
    engine = Engine(target, BlockProposer(make_drafter(target, 3), target.head), rows=5)
    engine.pads, ran = False, []

    def step() -> list[Round]:
        rounds = Engine.step(engine)
        ran.append([one.proposed for one in rounds])
        return rounds

    engine.step = step
    assert 1.0 <= engine_costs(engine, 3, budget=0.1).uneven < 20
    assert [0, 2, 0, 2] in ran
    ran.clear()
    engine.pads = True
    assert engine_costs(engine, 3, budget=0.1).uneven == 1.0
    assert [0, 2, 0, 2] not in ran


def test_without_drafts(random_target) -> None:
    engine = Engine(random_target(max_position_embeddings=128), PlainProposer(), rows=2)
    costs = engine_costs(engine, 0, budget=0.1)
    assert costs.tokens == (1, 2)
    assert costs.draft_rows == ()


def test_a_size_is_measured_as_what_it_is() -> None:
    """65 tokens of 64 rows must not be timed as 128."""
    for tokens in range(1, 321):
        rows, width = layout(tokens, 64, 5)
        assert rows <= 64
        assert width <= 5
        assert tokens <= rows * width <= max(1.04 * tokens, tokens + 1)
    assert layout(64, 64, 5) == (64, 1)
    assert layout(128, 64, 5) == (64, 2)
