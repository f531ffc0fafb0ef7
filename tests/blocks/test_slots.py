"""Both block conventions, with hand-computed values."""

import pytest
import torch

from dspark_train.blocks import BlockSlots


def test_dspark_proposes_from_every_slot() -> None:
    slots = BlockSlots(3, sample_from_anchor=True)
    anchors = torch.tensor([[5]])
    assert slots.num_proposals == 3
    assert slots.positions(anchors).tolist() == [[[5, 6, 7]]]
    assert slots.label_positions(anchors).tolist() == [[[6, 7, 8]]]
    assert slots.predecessor_positions(anchors).tolist() == [[[5, 6, 7]]]
    # slot k proposes the token at anchor + 1 + k
    at = slots.positions(anchors)[..., slots.proposing]
    assert (slots.label_positions(anchors) - at).tolist() == [[[1, 1, 1]]]


def test_dflash_slot_zero_proposes_nothing() -> None:
    slots = BlockSlots(3, sample_from_anchor=False)
    anchors = torch.tensor([[5]])
    assert slots.num_proposals == 2
    assert slots.positions(anchors).tolist() == [[[5, 6, 7]]]
    assert slots.label_positions(anchors).tolist() == [[[6, 7]]]
    assert slots.predecessor_positions(anchors).tolist() == [[[5, 6]]]
    # slot k proposes the token at its own position anchor + k
    at = slots.positions(anchors)[..., slots.proposing]
    assert (slots.label_positions(anchors) - at).tolist() == [[[0, 0]]]


def test_slot_zero_holds_the_anchor_token() -> None:
    """Fault 26: a mask token in slot 0 halves acceptance."""
    tokens = BlockSlots(4).inputs(torch.tensor([[7, 8]]), mask_token_id=99)
    assert tokens.tolist() == [[[7, 99, 99, 99], [8, 99, 99, 99]]]


def test_supervision_is_a_contiguous_prefix_inside_the_document() -> None:
    slots = BlockSlots(3)
    #                         0  1  2  3  4  5  6  7 | 8  9
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
    anchors = torch.tensor([[1, 2, 5, 8]])
    ends = torch.tensor([[8, 8, 8, 10]])
    assert slots.supervised(anchors, ends, mask).int().tolist() == [
        [
            [1, 1, 0],  # labels 2 3 4: 4 is not supervised
            [1, 0, 0],  # labels 3 4 5: what follows a gap is dropped
            [1, 1, 0],  # labels 6 7 8: 8 is another document
            [1, 0, 0],  # labels 9 10 11: past the end of the row
        ]
    ]


@pytest.mark.parametrize(("size", "from_anchor"), [(0, True), (1, False)])
def test_a_block_without_proposals_is_refused(size: int, from_anchor: bool) -> None:
    with pytest.raises(ValueError, match=f"block_size={size}"):
        BlockSlots(size, from_anchor)
