"""The confidence head: how likely the target accepts a proposal, given that it got that far."""

import torch
from torch import nn

from dspark_train.drafter.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """`c = σ(w·[h; e] + b)`, e the Markov embedding of the token before (DSpark, section 3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = (
            config.confidence_head_with_markov and config.markov_head_type is not None
        )
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def logits(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits `[...]` of hidden states `[..., D]` and embeddings `[..., R]`."""
        if self.with_markov:
            hidden = torch.cat((hidden, embedding.to(hidden.dtype)), dim=-1)
        return self.proj(hidden).squeeze(-1)
