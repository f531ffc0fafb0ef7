"""The verdict, rule by rule (fault kinds 1-6)."""

import math

import pytest
import torch

from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import draw
from dspark_train.decoding.verify import accepts, residual, verify, verify_greedy

LAST = math.nextafter(1.0, 0.0)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def test_a_wrong_draft_of_length_one_is_rejected():
    """Fault kind 2: at any u, and certain drafts too."""
    target = rows([0.0, 0.4, 0.6], [1.0, 0.0, 0.0])
    for draft in (None, rows([1.0, 0.0, 0.0])):
        for u in (0.0, 0.5, LAST):
            verdict = verify(target, [0], draft, [u])
            assert verdict.accepted == 0
            torch.testing.assert_close(verdict.next_probs, rows([0.0, 0.4, 0.6])[0])


def test_acceptance_is_half_open():
    assert accepts(0.0, 0.5, 1e-30)
    assert not accepts(0.0, 0.5, 0.0)
    assert not accepts(0.5, 1.0, 0.5)
    assert accepts(0.4999, 1.0, 0.5)
    assert accepts(LAST, 0.5, 0.5)


def test_the_first_rejection_ends_the_proposal():
    target = rows([0.5, 0.5], [0.2, 0.8], [0.9, 0.1], [0.3, 0.7])
    draft = rows([0.5, 0.5], [1.0, 0.0], [0.9, 0.1])
    verdict = verify(target, [0, 0, 0], draft, [0.9, 0.9, 0.0])
    assert verdict.accepted == 1
    torch.testing.assert_close(verdict.next_probs, rows([0.0, 1.0])[0])


def test_full_acceptance_gives_the_row_after_the_last_draft():
    target = rows([0.5, 0.5], [0.2, 0.8], [0.3, 0.7])
    verdict = verify(target, [0, 1], target[:2], [LAST, LAST])
    assert verdict.accepted == 2
    assert torch.equal(verdict.next_probs, target[2])


def test_no_drafts_give_the_targets_own_row():
    verdict = verify(rows([0.3, 0.7]), [], None, [])
    assert verdict.accepted == 0
    assert torch.equal(verdict.next_probs, rows([0.3, 0.7])[0])


def test_a_residual_of_nothing_falls_back_to_the_target():
    """Fault kind 6: equal rows leave a zero residual."""
    row = rows([0.25, 0.75])[0]
    assert torch.equal(residual(row, row, 0), row)
    assert torch.equal(residual(rows([0.0, 1.0])[0], None, 1), rows([0.0, 1.0])[0])


def test_mean_acceptance_is_the_overlap():
    """Fault kind 5: a u that is stuck at 0 would accept everything."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 6, generator=generator).mul(2).softmax(-1)
    randomness, n = Randomness(3), 4_000
    accepted = 0
    for position in range(n):
        token = draw(draft, randomness.uniform(position, "propose"))
        u = randomness.uniform(position, "accept")
        accepted += accepts(u, draft[token].item(), target[token].item())
    overlap = torch.minimum(target, draft).sum().item()
    assert accepted / n == pytest.approx(overlap, abs=4 * math.sqrt(overlap * (1 - overlap) / n))


def test_greedy_equals_one_hot_rows():
    for choices, tokens in [
        ([1, 2, 0], [1, 2]),
        ([1, 2, 0], [1, 0]),
        ([1, 2, 0], [0, 2]),
        ([2], []),
    ]:
        one_hot = torch.nn.functional.one_hot(torch.tensor(choices), 3).float()
        verdict = verify(one_hot, tokens, None, [LAST] * len(tokens))
        accepted, token = verify_greedy(choices, tokens)
        assert (verdict.accepted, draw(verdict.next_probs, 0.5)) == (accepted, token)


@pytest.mark.parametrize(
    ("target_rows", "draft_shape", "uniforms"), [(2, (2, 3), 2), (3, (2, 3), 1), (3, (2, 4), 2)]
)
def test_lengths_that_contradict_are_refused(target_rows, draft_shape, uniforms):
    with pytest.raises(ValueError, match=r"expected|need"):
        verify(
            torch.full((target_rows, 3), 1 / 3), [0, 1], torch.rand(draft_shape), [0.5] * uniforms
        )


@pytest.mark.parametrize("length", [1, 2])
def test_appendix_a_of_dspark_at_static_verify_lengths(length: int) -> None:
    """Law 8 without a scheduler: p = (.7, .3), q = (.5, .5) gives (.7, .3) at any fixed length."""
    target = torch.tensor([[0.7, 0.3]]).repeat(length + 1, 1)
    draft = torch.tensor([[0.5, 0.5]]).repeat(length, 1)
    steps = 1000  # the thresholds lie on this grid, and u takes the middle of each cell
    first = torch.zeros(2, dtype=torch.float64)
    for token in (0, 1):
        tokens = [token] * length
        for cell in range(steps):
            verdict = verify(target, tokens, draft, [(cell + 0.5) / steps] * length)
            weight = 0.5 / steps
            if verdict.accepted:
                first[token] += weight
            else:
                first += weight * verdict.next_probs.double()
    torch.testing.assert_close(first, torch.tensor([0.7, 0.3]).double(), rtol=0, atol=1e-6)
