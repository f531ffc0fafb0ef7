"""Both kinds of block attention against the dense square, in value and gradient."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from dspark_train.blocks import ContextSpan, Sight
from dspark_train.drafter.flex import flex_attend, flex_mask
from dspark_train.drafter.two_part import PartMask, two_part_attend

B, A, K, S, HEADS, KV_HEADS, WIDTH = 2, 5, 3, 19, 4, 2, 16
SCALE = WIDTH**-0.5
SIGHTS = [Sight(), Sight(4), Sight(30), Sight(4, from_anchor=True), Sight(causal=True)]
SIGHTS += [Sight(4, causal=True), Sight(2, from_anchor=True, causal=True)]


def make_case() -> tuple[list[torch.Tensor], ContextSpan, torch.Tensor]:
    """Leaves in float64; blocks of two documents a row, the second starts at 8."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(B, A, K, HEADS, WIDTH)]
    shapes += [(B, KV_HEADS, S, WIDTH)] * 2 + [(B, A, KV_HEADS, K, WIDTH)] * 2
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    starts = torch.tensor([[0, 0, 0, 8, 8], [0, 0, 8, 8, 8]])
    ends = torch.tensor([[1, 5, 7, 9, 15], [0, 3, 12, 16, 18]])  # one block sees no context
    positions = (ends - starts)[..., None] + torch.arange(K)
    return leaves, ContextSpan(starts, ends), positions


def square(
    leaves: list[torch.Tensor], span: ContextSpan, positions: torch.Tensor, sight: Sight
) -> torch.Tensor:
    """The mask written out element by element, and plain softmax attention over everything."""
    queries, past_keys, past_values, own_keys, own_values = leaves
    visible = torch.zeros(B, A * K, S + A * K, dtype=torch.bool)
    for b in range(B):
        for a in range(A):
            for k in range(K):
                start, end = int(span.starts[b, a]), int(span.ends[b, a])
                t = int(positions[b, a, k])
                for s in range(start, end):
                    behind = end - s - 1 if sight.from_anchor else t - (s - start)
                    visible[b, a * K + k, s] = sight.window is None or behind < sight.window
                last = k + 1 if sight.causal else K
                visible[b, a * K + k, S + a * K : S + a * K + last] = True
    keys, values = (
        torch.cat((past, own.transpose(1, 2).flatten(2, 3)), 2).repeat_interleave(2, 1)
        for past, own in ((past_keys, own_keys), (past_values, own_values))
    )
    scores = queries.flatten(1, 2).transpose(1, 2) @ keys.transpose(-1, -2) / WIDTH**0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2).reshape(B, A, K, HEADS, WIDTH)


def with_gradients(mixed: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    towards = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view_as(mixed)
    return [mixed, *torch.autograd.grad((mixed * towards).sum(), leaves)]


@pytest.mark.parametrize("sight", SIGHTS)
def test_two_parts_are_the_square(sight: Sight) -> None:
    leaves, span, positions = make_case()
    expected = with_gradients(square(leaves, span, positions, sight), leaves)
    queries, *rest = leaves
    mask = PartMask(span.mask(S, positions, sight), sight.causal)
    mixed = two_part_attend(queries, tuple(rest[:2]), tuple(rest[2:]), mask, SCALE)
    # scores are at least float32, and no wider
    torch.testing.assert_close(with_gradients(mixed, leaves), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("sight", SIGHTS)
def test_flex_is_the_square(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eager mathematics; only a check of the device keeps gradients from running on a CPU."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    leaves, span, positions = make_case()
    expected = with_gradients(square(leaves, span, positions, sight), leaves)
    queries, *rest = leaves
    mask = flex_mask(span.lowest(positions, sight), span.ends, S, sight.causal)
    mixed = flex_attend(queries, tuple(rest[:2]), tuple(rest[2:]), mask, SCALE)
    torch.testing.assert_close(with_gradients(mixed, leaves), expected, rtol=1e-9, atol=1e-9)


def test_every_sight_is_another() -> None:
    leaves, span, positions = make_case()
    results = [square(leaves, span, positions, sight) for sight in SIGHTS if sight.window != 30]
    assert all(not torch.allclose(one, other) for one, other in pairwise(results))


def test_tiles_of_other_blocks_are_skipped_by_flex() -> None:
    """With 128 blocks of 8 slots in tiles of 128, only the diagonal of slots × slots is kept."""
    ends = torch.arange(1, 129)[None]
    mask = flex_mask(torch.zeros(1, 128, 8, dtype=torch.int64), ends, 256)
    kept = mask.to_dense()[0, 0].bool()
    assert torch.equal(kept[:, 2:], torch.eye(8, dtype=torch.bool))
