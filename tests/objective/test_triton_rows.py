"""The Triton rows in Triton's interpreter against the plain ones, which law 4 covers."""

import pytest
import torch

from dspark_train.objective import ObjectiveWeights, lean_loss
from dspark_train.objective.rows import PlainRows
from tests.objective.test_loss import OBJECTIVES, TWO_BLOCKS, random_case, results

# tests/__init__.py makes every kernel an interpreted function
pytest.importorskip("triton", reason="triton is not installed: pip install dspark_train[triton]")
from dspark_train.objective import triton_rows


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens are two blocks and a part of a third."""
    monkeypatch.setattr(triton_rows, "BLOCK", 16)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0, "logit_scale": 0.7}])
def test_triton_rows_are_the_plain_ones(objective: str, config: dict[str, float]) -> None:
    weights = ObjectiveWeights(**{"ce": 0.0, "tv": 0.0} | OBJECTIVES[objective], confidence=0.5)
    plain, kernels = (
        results(
            lean_loss,
            random_case(torch.float32, True, **config),
            weights,
            memory_mb=TWO_BLOCKS,
            kernel=kernel,
        )
        for kernel in ("plain", "triton")
    )
    # the slope of a logarithm of a small overlap magnifies what rounding leaves
    torch.testing.assert_close(kernels, plain, rtol=1e-5, atol=2e-5)


def test_bf16_logits_are_read_and_gradients_written_in_bf16() -> None:
    weights = ObjectiveWeights(**OBJECTIVES["all"])
    torch.manual_seed(5)
    logits, target = torch.randn(2, 6, 100).mul(4).bfloat16()
    shared, label = torch.tensor([3, 3, 0, 1, 5, 2]), torch.tensor([0, 99, 5, 16, 15, 50])
    found = []
    for kernel in (PlainRows, triton_rows.TritonRows):
        rows, own = kernel(weights, torch.float32), logits.clone()
        numbers, hit, saved = rows.divergences(own, rows.targets(target), shared, label)
        rows.gradient_(own, saved, numbers.map(lambda one: torch.linspace(0.5, 1, len(one))))
        found.append((list(vars(numbers).values()), hit, own))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=8e-3, atol=1e-6)  # one rounding


def test_rows_without_probability_where_the_target_has_none_stay_finite() -> None:
    logits = torch.tensor([[500.0, 0.0, 0.0], [-1e4, 0.0, 3.0]])
    rows = triton_rows.TritonRows(ObjectiveWeights(**OBJECTIVES["all"]), torch.float32)
    targets = rows.targets(torch.tensor([[0.0, 0.0, 500.0]]))
    numbers, _, saved = rows.divergences(
        logits, targets, torch.tensor([0, 0]), torch.tensor([1, 1])
    )
    assert numbers.ce.tolist() == pytest.approx([500.0, 3.0486], rel=1e-4)
    rows.gradient_(logits, saved, numbers.map(torch.ones_like))
    assert logits.isfinite().all()


def test_other_sums_than_float32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        lean_loss(*random_case(torch.float64, True), ObjectiveWeights(), kernel="triton")
