"""Which positions are anchors, and that the draw is a function of (seed, epoch, document)."""

import torch

from dspark_train.blocks import context_mask, eligible_anchors, sample_anchors


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
    mask = context_mask(torch.tensor([[2, 5]]), torch.tensor([[0, 4]]), 6)
    assert mask.int().tolist() == [[[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]]]
