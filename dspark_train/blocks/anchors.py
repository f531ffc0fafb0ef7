"""Which positions may be anchors, and the seeded draw of those a pass trains on."""

import torch


def eligible_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions of one document that may be anchors: supervised, with a supervised successor.

    Args:
        loss_mask: `[T]` bool.

    Returns:
        `[N]` int64, ascending.
    """
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(-1)


def sample_anchors(
    loss_mask: torch.Tensor, count: int, *, seed: int, epoch: int, document: int
) -> torch.Tensor:
    """Draw at most `count` anchors of one document without replacement, ascending.

    The draw depends on (seed, epoch, document) alone, so every rank and every resumed run draws
    the same anchors.
    """
    eligible = eligible_anchors(loss_mask)
    if len(eligible) <= count:
        return eligible
    generator = torch.Generator().manual_seed(
        (seed * 1_000_003 + epoch) * 1_000_003 + document & (2**63 - 1)
    )
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return eligible[chosen].sort().values
