"""The reference loss against values computed by hand, and the lean one against it (law 4)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_train.objective import BlockStates, ObjectiveWeights, lean_loss, reference_loss
from dspark_train.objective.rows import PlainRows
from dspark_train.target.head import TargetHead
from tests.golden_tensors import head_of

LOSSES = [reference_loss, lean_loss]
TWO_BLOCKS = 2 * 4 * 37 * 3 * 4 / 2**20  # of the random case in float32, in MB
OBJECTIVES = {
    "dspark": {"ce": 0.3, "tv": 0.8},
    "kl": {"kl": 1.0},
    "reverse_kl": {"reverse_kl": 1.0},
    "log_overlap": {"log_overlap": 1.0},
    "blend": {"blend": 1.0},
    "length": {"length": 1.0},
    "sharp": {"ce": 0.3, "tv": 0.8, "kl": 0.4, "label_temperature": 0.5},
    "all": {"ce": 0.3, "tv": 0.2, "kl": 0.4, "reverse_kl": 0.5, "log_overlap": 0.6, "blend": 0.7}
    | {"length": 0.8},
}


def by_hand(confidence: torch.Tensor | None, supervised: list[bool]) -> tuple[Any, ...]:
    """One block of two proposals over three tokens; the identity as LM head gives logits."""
    draft = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]).log()
    target = torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.1, 0.8]]).log()
    states = BlockStates(
        hidden=draft,
        latents=None,
        confidence_logits=confidence,
        labels=torch.tensor([[2, 0]]),
        supervised=torch.tensor([supervised]),
        target_hidden=target,
        target_rows=torch.tensor([[0, 1]]),
    )
    return states, head_of(torch.eye(3), torch.eye(3)), None


@pytest.mark.parametrize("loss", LOSSES)
def test_terms_by_hand(loss: Callable) -> None:
    """Fault 36: the first proposing slot has weight 1, the next exp(-1/4)."""
    weights = ObjectiveWeights(ce=1.0, tv=2.0, confidence=3.0)
    terms = loss(*by_hand(torch.tensor([[0.0, 0.0]]), [True, True]), weights)
    second = math.exp(-0.25)
    ce = -math.log(0.25) - second * math.log(0.1)
    assert terms.weight.item() == pytest.approx(1 + second)
    assert terms.ce.item() == pytest.approx(ce, rel=1e-6)
    assert terms.tv.item() == pytest.approx(0.5, rel=1e-5)  # the L1 norm is not halved
    assert terms.acceptance.tolist() == pytest.approx([0.75, 1.0])
    assert terms.confidence.item() == pytest.approx((1 + second) * math.log(2), rel=1e-6)
    assert terms.confidence_error.tolist() == pytest.approx([0.25, 0.5])
    assert terms.expected_length.item() == pytest.approx(1 + 0.75 + 0.75)
    assert terms.correct.tolist() == [0, 0]
    expected = (ce + 2 * 0.5 + 3 * (1 + second) * math.log(2)) / (1 + second)
    assert terms.loss().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # the second proposal has draft = target: no divergence, overlap 1
        ("kl", 0.25 * math.log(1 / 2) + 0.5 * math.log(2)),
        ("reverse_kl", 0.5 * math.log(2) + 0.25 * math.log(1 / 2)),
        ("log_overlap", -math.log(0.75)),
        (
            "blend",
            math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
        ),
        ("length", -(0.75 + 0.75 * 1.0)),  # not weighted by slot
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_objectives_by_hand(loss: Callable, name: str, expected: float) -> None:
    weights = ObjectiveWeights(**{"ce": 0.0, "tv": 0.0, name: 2.0})
    terms = loss(*by_hand(None, [True, True]), weights)
    assert terms.numerator.item() == pytest.approx(2 * expected, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_sharper_labels_by_hand(loss: Callable) -> None:
    """At temperature 0.5 the target's probabilities are squared, and add up to one again."""
    found = loss(*by_hand(None, [True, False]), ObjectiveWeights(label_temperature=0.5))
    squared = [0.0625 / 0.375, 0.0625 / 0.375, 0.25 / 0.375]
    l1 = sum(abs(p - q) for p, q in zip(squared, (0.5, 0.25, 0.25), strict=True))
    assert found.tv.item() == pytest.approx(l1, rel=1e-5)
    assert found.acceptance.tolist() == pytest.approx([1 - l1 / 2, 0.0])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_share_of_kl_in_the_blend_passes_no_gradient(loss: Callable) -> None:
    """With p = softmax(h): the slope of λ KL + (1 - λ)(1 - overlap) by h, λ held."""
    states, head, _ = by_hand(None, [True, False])
    hidden = states.hidden.clone().requires_grad_()
    terms = loss(
        replace(states, hidden=hidden), head, None, ObjectiveWeights(ce=0.0, tv=0.0, blend=1.0)
    )
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    kl_share, below = math.exp(-3 * 0.75), torch.tensor([0.0, 0.5, 1.0])  # a tie counts half
    overlap_slope = p * (below - (p * below).sum())
    expected = kl_share * (p - q) - (1 - kl_share) * overlap_slope
    (gradient,) = torch.autograd.grad(terms.numerator, hidden)
    torch.testing.assert_close(gradient[0, 0], expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_draft_that_shares_nothing_with_the_target_stays_finite(loss: Callable) -> None:
    states, head, _ = by_hand(None, [True, True])
    far = torch.tensor([[[500.0, 0.0, 0.0], [0.0, 500.0, 0.0]]], requires_grad=True)
    states = replace(states, hidden=far, target_hidden=torch.tensor([[0.0, 0, 500]] * 2))
    weights = ObjectiveWeights(ce=0.0, tv=0.0, log_overlap=1.0, kl=1.0, reverse_kl=1.0)
    terms = loss(states, head, None, weights)
    (gradient,) = torch.autograd.grad(terms.numerator, far)
    assert terms.numerator.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_unsupervised_slots_count_nowhere(loss: Callable) -> None:
    terms = loss(*by_hand(torch.tensor([[0.0, 50.0]]), [True, False]), ObjectiveWeights())
    assert terms.weight.item() == 1.0
    assert terms.ce.item() == pytest.approx(-math.log(0.25))
    assert terms.supervised.tolist() == [1, 0]
    assert terms.confidence.item() == pytest.approx(math.log(2))
    assert terms.expected_length.item() == pytest.approx(1.75)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_supervision_is_zero_not_nan(loss: Callable) -> None:
    terms = loss(*by_hand(None, [False, False]), ObjectiveWeights())
    assert terms.loss().item() == 0.0
    assert terms.blocks.item() == 0


def random_case(dtype: torch.dtype, markov: bool, **config: Any) -> tuple[Any, ...]:
    """20 blocks of 4 proposals, D 16, R 5, V 37, with shared target rows."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    states = BlockStates(
        hidden=normal(20, 4, 16).requires_grad_(),
        latents=normal(20, 4, 5).requires_grad_() if markov else None,
        confidence_logits=normal(20, 4).requires_grad_(),
        labels=torch.randint(37, (20, 4), generator=generator),
        supervised=(torch.rand(20, 4, generator=generator) < 0.8).cumprod(-1).bool(),
        target_hidden=normal(30, 16),
        target_rows=torch.randint(30, (20, 4), generator=generator),
    )
    w2 = normal(37, 5).requires_grad_() if markov else None
    projection = normal(37, 16)
    head: TargetHead = head_of(projection.clone(), projection, **config).to(dtype)
    return states, head, w2


def results(loss: Callable, case: tuple[Any, ...], weights: ObjectiveWeights, **extra: Any) -> Any:
    """All terms, and the gradients by everything that has one."""
    states, head, w2 = case
    terms = loss(states, head, w2, weights, **extra)
    leaves = [states.hidden, states.confidence_logits]
    leaves += [] if states.latents is None else [states.latents, w2]
    gradients = torch.autograd.grad(terms.loss(), leaves)
    return [getattr(terms, name) for name in terms.__annotations__], gradients


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0, "logit_scale": 0.7}])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_lean_equals_reference(
    dtype: torch.dtype, close: float, markov: bool, config: dict[str, float], objective: str
) -> None:
    """Law 4, with chunks of one or two blocks whose target rows are shared and out of order."""
    given = {"ce": 0.0, "tv": 0.0} | OBJECTIVES[objective]
    weights = ObjectiveWeights(**given, confidence=0.5, loss_decay=3.0)
    expected = results(reference_loss, random_case(dtype, markov, **config), weights)
    case = random_case(dtype, markov, **config)
    lean = results(lean_loss, case, weights, memory_mb=TWO_BLOCKS)
    torch.testing.assert_close(lean, expected, rtol=close, atol=close)


def test_bf16_products_and_float32_sums() -> None:
    """In bf16 both twins are as far from float32 as bf16 products are, and no further."""
    exact = results(lean_loss, random_case(torch.float32, True), ObjectiveWeights())
    for loss in LOSSES:
        terms, gradients = results(loss, random_case(torch.bfloat16, True), ObjectiveWeights())
        assert terms[0].dtype == torch.float32
        torch.testing.assert_close(terms[:4], exact[0][:4], rtol=2e-2, atol=2e-2)
        for rough, wanted in zip(gradients, exact[1], strict=True):
            assert rough.dtype == torch.bfloat16
            assert (rough - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_float32_head_under_autocast(loss: Callable) -> None:
    case = random_case(torch.float32, markov=True)
    exact = results(reference_loss, case, ObjectiveWeights())
    with torch.autocast("cpu", torch.bfloat16):
        terms, gradients = results(loss, case, ObjectiveWeights())
    torch.testing.assert_close(terms[:4], exact[0][:4], rtol=2e-2, atol=2e-2)
    for rough, wanted in zip(gradients, exact[1], strict=True):
        assert rough.dtype == torch.float32
        assert (rough - wanted).norm() < 0.03 * wanted.norm()


def test_lean_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix product of the LM head sees more rows than the budget allows."""
    states, head, w2 = random_case(torch.float32, markov=True)
    rows: list[int] = []
    inner = head.logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return inner(hidden)

    monkeypatch.setattr(head, "logits", recorded)
    lean_loss(states, head, w2, ObjectiveWeights(), memory_mb=TWO_BLOCKS)
    assert 4 < max(rows) <= 8
    # each supervised proposal once, and never more target rows than proposals
    assert sum(rows) < 2 * int(states.supervised.sum())


def test_a_target_row_is_computed_once_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head, w2 = random_case(torch.float32, markov=True)
    rows: list[int] = []
    inner = head.logits
    monkeypatch.setattr(head, "logits", lambda hidden: rows.append(len(hidden)) or inner(hidden))
    lean_loss(states, head, w2, ObjectiveWeights())
    used = states.target_rows[states.supervised].unique()
    assert rows == [len(used), int(states.supervised.sum())]


def test_without_gradient_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(torch.float32, markov=True)
    expected, _ = results(lean_loss, case, ObjectiveWeights())
    monkeypatch.setattr(PlainRows, "gradient_", None)
    with torch.no_grad():
        terms = lean_loss(*case, ObjectiveWeights())
    torch.testing.assert_close([getattr(terms, n) for n in terms.__annotations__], expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_soft_label_passes_no_gradient(loss: Callable) -> None:
    states, head, w2 = random_case(torch.float32, markov=True)
    terms = loss(states, head, w2, ObjectiveWeights(ce=0.0, tv=0.0, confidence=1.0))
    leaves = (states.hidden, states.latents, states.confidence_logits)
    hidden, latents, confidence = torch.autograd.grad(terms.loss(), leaves, allow_unused=True)
    for gradient in (hidden, latents):
        assert gradient is None or gradient.abs().max() == 0
    assert confidence.abs().max() > 0
