"""What is watched adds up, and means what it says."""

import math

import torch

from dspark_train.objective import BlockStates, ObjectiveWeights
from dspark_train.objective.terms import LossTerms, assemble
from dspark_train.training.sums import BINS, Sums, area_under_curve, label_entropy

CPU = torch.device("cpu")


def terms(blocks: int, seed: int, supervised: torch.Tensor | None = None) -> LossTerms:
    """Terms of `blocks` blocks of 3 proposals with made-up distances."""
    torch.manual_seed(seed)
    shape = (blocks, 3)
    states = BlockStates(
        hidden=torch.empty(*shape, 1),
        latents=None,
        confidence_logits=torch.randn(shape),
        labels=torch.zeros(shape, dtype=torch.int64),
        supervised=torch.rand(shape).lt(0.8).cumprod(-1).bool()
        if supervised is None
        else supervised,
        target_hidden=torch.empty(1, 1),
        target_rows=torch.zeros(shape, dtype=torch.int64),
    )
    return assemble(
        states,
        ObjectiveWeights(),
        distance=states.supervised.sum().float(),
        ce=torch.rand(shape) * states.supervised,
        l1=2 * torch.rand(shape) * states.supervised,
        correct=torch.rand(shape) < 0.5,
    )


def summed(*parts: LossTerms) -> Sums:
    sums = Sums(3, CPU)
    for part in parts:
        sums.add(part)
    return sums


def test_rates_are_over_slots_not_over_batches() -> None:
    """Fault 38: a batch of one slot counts as one slot."""
    many, one = terms(50, 0), terms(1, 1)
    both = summed(many, one).metrics("x")
    accepted = (many.acceptance + one.acceptance) / (many.supervised + one.supervised)
    for k in range(3):
        assert math.isclose(both[f"x/acceptance_{k}"], accepted[k], rel_tol=1e-6)
        assert 0 <= both[f"x/acceptance_{k}"] <= 1
    expected = (many.numerator + one.numerator) / (many.weight + one.weight)
    assert math.isclose(both["x/loss"], expected, rel_tol=1e-6)
    assert math.isclose(
        both["x/tau"],
        (many.expected_length + one.expected_length) / (many.blocks + one.blocks),
        rel_tol=1e-6,
    )


def test_nothing_supervised_says_nothing() -> None:
    nothing = terms(4, 0, supervised=torch.zeros(4, 3, dtype=torch.bool))
    sums = summed(nothing)
    assert sums.weight == sums.blocks == sums.supervised == 0
    assert sums.metrics("x", curve=True) == {}
    something = terms(9, 1)
    assert summed(nothing, something).metrics("x") == summed(something).metrics("x")


def test_label_entropy_is_the_least_binary_cross_entropy() -> None:
    labels = torch.tensor([0.0, 0.1, 0.5, 1.0])
    least = torch.nn.functional.binary_cross_entropy(labels, labels, reduction="none")
    torch.testing.assert_close(label_entropy(labels), least)


def test_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    torch.manual_seed(0)
    confidence, accepted = torch.randint(0, 20, (60,)), torch.rand(60)
    taken = torch.zeros(BINS).scatter_add(0, confidence, accepted)
    lost = torch.zeros(BINS).scatter_add(0, confidence, 1 - accepted)
    pairs = accepted[:, None] * (1 - accepted)[None]
    order = (confidence[:, None] > confidence[None]) + 0.5 * (confidence[:, None] == confidence)
    expected = ((pairs * order).sum() / pairs.sum()).item()
    assert math.isclose(area_under_curve(taken, lost), expected, rel_tol=1e-5)


def test_a_confidence_that_knows_and_one_that_does_not() -> None:
    def measured(logits: torch.Tensor) -> float:
        states = BlockStates(
            hidden=torch.empty(200, 1, 1),
            latents=None,
            confidence_logits=logits,
            labels=torch.zeros(200, 1, dtype=torch.int64),
            supervised=torch.ones(200, 1, dtype=torch.bool),
            target_hidden=torch.empty(1, 1),
            target_rows=torch.zeros(200, 1, dtype=torch.int64),
        )
        part = assemble(
            states,
            ObjectiveWeights(),
            distance=torch.tensor(1.0),
            ce=torch.zeros(200, 1),
            l1=2.0 * (torch.arange(200)[:, None] % 2),  # accepted, rejected, accepted …
            correct=torch.ones(200, 1, dtype=torch.bool),
        )
        sums = Sums(1, CPU)
        sums.add(part)
        return sums.metrics("x", curve=True)["x/confidence_auc_0"]

    sign = 1.0 - 2.0 * (torch.arange(200)[:, None] % 2)
    assert measured(sign) == 1.0
    assert measured(-sign) == 0.0
    assert measured(torch.zeros(200, 1)) == 0.5
