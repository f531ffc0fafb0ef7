"""The reference loss against values computed by hand, and the lean one against it (law 4)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark_train.objective import BlockStates, ObjectiveWeights, lean_loss, reference_loss
from dspark_train.target.head import TargetHead
from tests.golden_tensors import head_of

LOSSES = [reference_loss, lean_loss]
FIVE_ROWS = 5 * 37 * 2 * 4 / 2**20  # of the random case in float32, in MB


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


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0, "logit_scale": 0.7}])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_lean_equals_reference(
    dtype: torch.dtype, close: float, markov: bool, config: dict[str, float]
) -> None:
    """Law 4. The chunk of 5 rows cuts through rows that share a target."""
    weights = ObjectiveWeights(ce=0.3, tv=0.8, confidence=0.5, loss_decay=3.0)
    results = []
    for loss, extra in ((reference_loss, {}), (lean_loss, {"memory_mb": FIVE_ROWS})):
        states, head, w2 = random_case(dtype, markov, **config)
        terms = loss(states, head, w2, weights, **extra)
        leaves = [states.hidden, states.confidence_logits]
        leaves += [states.latents, w2] if markov else []
        gradients = torch.autograd.grad(terms.loss(), leaves)
        results.append(([getattr(terms, name) for name in terms.__annotations__], gradients))
    (expected_terms, expected), (lean_terms, lean) = results
    torch.testing.assert_close(lean_terms, expected_terms, rtol=close, atol=close)
    torch.testing.assert_close(lean, expected, rtol=close, atol=close)


def test_lean_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix product of the LM head sees more rows than the budget allows."""
    states, head, w2 = random_case(torch.float32, markov=True)
    rows: list[int] = []
    inner = head.logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return inner(hidden)

    monkeypatch.setattr(head, "logits", recorded)
    lean_loss(states, head, w2, ObjectiveWeights(), memory_mb=FIVE_ROWS)
    assert max(rows) == 5
    # each supervised row once, plus each used target row at most twice (a chunk border in it)
    supervised = int(states.supervised.sum())
    assert sum(rows) < supervised + 2 * 30


@pytest.mark.parametrize("loss", LOSSES)
def test_the_soft_label_passes_no_gradient(loss: Callable) -> None:
    states, head, w2 = random_case(torch.float32, markov=True)
    terms = loss(states, head, w2, ObjectiveWeights(ce=0.0, tv=0.0, confidence=1.0))
    leaves = (states.hidden, states.latents, states.confidence_logits)
    hidden, latents, confidence = torch.autograd.grad(terms.loss(), leaves, allow_unused=True)
    for gradient in (hidden, latents):
        assert gradient is None or gradient.abs().max() == 0
    assert confidence.abs().max() > 0
