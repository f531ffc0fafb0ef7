"""What two distributions say about acceptance (Leviathan et al. 2023, section 3; DSpark, eq. 1)."""

import torch


def overlap(draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Probability `[...]` that a token drawn from `draft_probs` `[..., V]` is accepted.

    `Σ min(draft, target) = 1 - ½‖draft - target‖₁`.
    """
    return 1.0 - 0.5 * (draft_probs - target_probs).abs().sum(-1)


def survival(acceptance: torch.Tensor) -> torch.Tensor:
    """Probability `[..., P]` that slot k and all before it are accepted."""
    return acceptance.cumprod(-1)


def expected_length(acceptance: torch.Tensor) -> torch.Tensor:
    """Expected committed tokens per round `[...]`, the added token counted (the papers' τ)."""
    return 1.0 + survival(acceptance).sum(-1)
