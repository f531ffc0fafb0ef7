"""What a block may see of the context. Inside a block every slot sees every slot."""

import torch


def context_mask(anchors: torch.Tensor, starts: torch.Tensor, context_length: int) -> torch.Tensor:
    """Context positions visible to each block: its own document, strictly before its anchor.

    Args:
        anchors: `[B, A]` anchor positions in the row.
        starts: `[B, A]` first position of the anchor's document in the row.
        context_length: S.

    Returns:
        `[B, A, S]` bool, true where the block attends.
    """
    position = torch.arange(context_length, device=anchors.device)
    return (position >= starts[..., None]) & (position < anchors[..., None])
