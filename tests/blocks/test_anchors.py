"""Which positions are anchors, and that the draw is a function of (seed, epoch, document)."""

import torch

from dspark_train.blocks import ContextSpan, Sight, eligible_anchors, sample_anchors


def test_an_anchor_is_supervised_and_so_is_its_successor() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 1]).bool()
    assert eligible_anchors(mask).tolist() == [2, 3, 8]


def test_draw_is_reproducible_and_differs_by_epoch_and_document() -> None:
    mask = torch.ones(200).bool()

    def draw(epoch: int, document: int) -> list[int]:
        return sample_anchors(mask, 8, seed=3, epoch=epoch, document=document).tolist()

    assert draw(0, 5) == draw(0, 5)
    assert draw(0, 5) == sorted(set(draw(0, 5)))
    assert len(draw(0, 5)) == 8
    assert draw(0, 5) != draw(1, 5)
    assert draw(0, 5) != draw(0, 6)
    assert draw(-1, 5) == draw(-1, 5)


def test_all_anchors_are_taken_when_few() -> None:
    assert sample_anchors(torch.ones(4).bool(), 9, seed=0, epoch=0, document=0).tolist() == [
        0,
        1,
        2,
    ]


def test_a_block_sees_its_document_strictly_before_its_anchor() -> None:
    span = ContextSpan(starts=torch.tensor([[0, 4]]), ends=torch.tensor([[2, 5]]))
    positions = torch.tensor([[[2, 3], [1, 2]]])
    mask = span.mask(6, positions)
    assert mask.int().tolist() == [[[[1, 1, 0, 0, 0, 0]], [[0, 0, 0, 0, 1, 0]]]]


def test_a_window_ends_before_its_slot_and_moves_with_it() -> None:
    """A block at anchor 5 of a document that starts at 2: slot k sees the 3 up to itself."""
    span = ContextSpan(starts=torch.tensor([[2]]), ends=torch.tensor([[7]]))
    mask = span.mask(9, torch.tensor([[[5, 6, 7]]]), Sight(3))
    assert mask.int().tolist() == [
        [[[0, 0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0], [0] * 9]]
    ]
    early = span.mask(9, torch.tensor([[[1, 2, 3]]]), Sight(3))  # never before the document
    assert early[0, 0, 0].int().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_a_window_that_begins_a_fixed_distance_before_the_anchor() -> None:
    """All slots see the same: the 3 before the anchor, and never what is before the document."""
    span = ContextSpan(starts=torch.tensor([[2, 2]]), ends=torch.tensor([[7, 4]]))
    mask = span.mask(9, torch.tensor([[[5, 6], [2, 3]]]), Sight(3, from_anchor=True))
    assert mask.int().tolist() == [
        [[[0, 0, 0, 0, 1, 1, 1, 0, 0]], [[0, 0, 1, 1, 0, 0, 0, 0, 0]]],
    ]
