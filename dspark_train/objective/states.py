"""What a loss reads: the drafter's states at every proposal, the target's last hidden states."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockStates:
    """N blocks of P proposals.

    Logits are not in here: how many of them exist at a time is the loss's own affair.

    Attributes:
        hidden: `[N, P, D]` post-norm hidden states of the proposing slots.
        latents: `[N, P, R]` latents of the sequential head, or None without one.
        confidence_logits: `[N, P]`, or None without a confidence head.
        labels: `[N, P]` token ids (anything where not supervised).
        supervised: `[N, P]` bool, a prefix per block.
        target_hidden: `[U, D]` the target's last hidden states, each position once.
        target_rows: `[N, P]` row of `target_hidden` that predicts the label.
    """

    hidden: torch.Tensor
    latents: torch.Tensor | None
    confidence_logits: torch.Tensor | None
    labels: torch.Tensor
    supervised: torch.Tensor
    target_hidden: torch.Tensor
    target_rows: torch.Tensor
