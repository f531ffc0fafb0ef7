"""The two block conventions. Nothing outside this file adds or subtracts 1 to a slot.

A block has K slots. Slot 0 holds the anchor token, the others the mask token, and slot k sits at
position `anchor + k`. The conventions differ in what a slot proposes:

* DSpark (`sample_from_anchor=True`): slot k proposes the token at `anchor + 1 + k`, k = 0…K-1.
* DFlash (`sample_from_anchor=False`): slot k proposes the token at `anchor + k`, k = 1…K-1;
  slot 0 proposes nothing.

In both, the i-th proposal is the token at `anchor + 1 + i`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockSlots:
    """Slots of a block of `block_size` positions under one of the two conventions.

    Raises:
        ValueError: a block that would propose nothing.
    """

    block_size: int
    sample_from_anchor: bool = True

    def __post_init__(self) -> None:
        least = 1 if self.sample_from_anchor else 2
        if self.block_size < least:
            raise ValueError(
                f"block_size={self.block_size} proposes nothing: expected at least {least} with "
                f"sample_from_anchor={self.sample_from_anchor}"
            )

    @property
    def first_proposing_slot(self) -> int:
        return 0 if self.sample_from_anchor else 1

    @property
    def proposing(self) -> slice:
        """The slots that propose, as a slice over the slot dimension."""
        return slice(self.first_proposing_slot, self.block_size)

    @property
    def num_proposals(self) -> int:
        """Tokens proposed by one block."""
        return self.block_size - self.first_proposing_slot

    def inputs(self, anchor_tokens: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """Token ids `[..., K]` which a block reads, from the anchor tokens `[...]`."""
        ids = anchor_tokens.new_full((*anchor_tokens.shape, self.block_size), mask_token_id)
        ids[..., 0] = anchor_tokens
        return ids

    def positions(self, anchors: torch.Tensor) -> torch.Tensor:
        """Positions `[..., K]` of the slots, for anchors `[...]`."""
        return anchors[..., None] + torch.arange(self.block_size, device=anchors.device)

    def label_positions(self, anchors: torch.Tensor) -> torch.Tensor:
        """Positions `[..., P]` of the P proposed tokens, for anchors `[...]`."""
        return anchors[..., None] + 1 + torch.arange(self.num_proposals, device=anchors.device)

    def predecessor_positions(self, anchors: torch.Tensor) -> torch.Tensor:
        """Positions `[..., P]` of the token before each proposed one; the first is the anchor.

        The Markov head reads the token there, and the target's last hidden state there gives the
        distribution of the proposed token.
        """
        return self.label_positions(anchors) - 1

    def supervised(
        self, anchors: torch.Tensor, ends: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        """Which proposals are supervised: the contiguous prefix of supervised labels.

        Args:
            anchors: `[B, A]` positions in their row.
            ends: `[B, A]` end (exclusive) of the anchor's document in the row.
            loss_mask: `[B, S]` bool, supervised tokens.

        Returns:
            `[B, A, P]` bool.
        """
        labels = self.label_positions(anchors)
        inside = labels < ends[..., None]
        reachable = labels.clamp(max=loss_mask.shape[1] - 1)
        masked = loss_mask.gather(1, reachable.flatten(1)).view_as(labels)
        return (inside & masked).cumprod(-1).bool()
