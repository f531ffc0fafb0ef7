"""Sequential heads: a low-rank bias on each slot's logits that depends on the token before it.

All of them make the bias `B = W2 z` of a latent `z` of rank R; they differ in how z comes from the
predecessor's embedding `e = W1[x]`, the slot's hidden state h, and (RNN) what came before.
"""

import torch
from torch import nn

from dspark_train.drafter.config import DrafterConfig

State = torch.Tensor | None
Latent = tuple[torch.Tensor, torch.Tensor, State]


class MarkovHead(nn.Module):
    """Vanilla: `z = e` (DSpark, section 3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocabulary, bias=False)
        # no bias at first: the heads start from the backbone's own logits
        self.markov_w2.initial_std = 0.0

    @torch.no_grad()
    def start_from(
        self, first: torch.Tensor, second: torch.Tensor, draft_ids: torch.Tensor | None
    ) -> None:
        """Take factors `[V, R]` of a bias as weights; only rows `draft_ids` of the second."""
        self.markov_w1.weight.copy_(first)
        self.markov_w2.weight.copy_(second if draft_ids is None else second[draft_ids])

    def candidates(self, unary: torch.Tensor) -> torch.Tensor:
        """Unary logits `[..., V]`, minus infinity where a token cannot be drafted."""
        return unary

    def start(self, hidden: torch.Tensor) -> State:
        """State before the first proposal of blocks whose hidden states are `[..., D]`."""
        return None

    def latent(self, state: State, previous: torch.Tensor, hidden: torch.Tensor) -> Latent:
        """Latent and embedding `[..., R]` and the new state, after tokens `previous` `[...]`."""
        embedding = self.markov_w1(previous)
        return embedding, embedding, state

    def step(self, state: State, previous: torch.Tensor, hidden: torch.Tensor) -> Latent:
        """Bias `[..., V]`, embedding `[..., R]` and new state for one slot."""
        latent, embedding, state = self.latent(state, previous, hidden)
        return self.markov_w2(latent), embedding, state

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher-forced latents and embeddings `[..., P, R]` of all proposals at once.

        Args:
            hidden: `[..., P, D]` post-norm hidden states of the proposing slots.
            previous: `[..., P]` true token before each proposal.
        """
        latent, embedding, _ = self.latent(None, previous, hidden)
        return latent, embedding


class GatedMarkovHead(MarkovHead):
    """Gated: `z = σ(W_g [h; e]) ⊙ e`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, state: State, previous: torch.Tensor, hidden: torch.Tensor) -> Latent:
        embedding = self.markov_w1(previous)
        gate = self.gate_proj(torch.cat((hidden, embedding), dim=-1)).sigmoid()
        return gate * embedding, embedding, state
