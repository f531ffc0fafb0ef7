"""The recurrent sequential head: its bias sees every token drafted before, not only the last."""

import torch
from torch import nn

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.markov import Latent, MarkovHead, State


class RnnMarkovHead(MarkovHead):
    """RNN: with `u = [s; e; h]`, `s ← σ(W_g u) ⊙ s + (1 - σ(W_g u)) ⊙ tanh(W_c u)`.

    The latent is `tanh(W_o u)` of the state before the update; `[W_g; W_c; W_o]` is one layer.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def start(self, hidden: torch.Tensor) -> State:
        return hidden.new_zeros((*hidden.shape[:-1], self.markov_w1.embedding_dim))

    def latent(self, state: State, previous: torch.Tensor, hidden: torch.Tensor) -> Latent:
        embedding = self.markov_w1(previous)
        joint = self.joint_proj(torch.cat((state, embedding, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return output.tanh(), embedding, state

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.start(hidden[..., 0, :])
        latents, embeddings = [], []
        for slot in range(hidden.shape[-2]):
            latent, embedding, state = self.latent(state, previous[..., slot], hidden[..., slot, :])
            latents.append(latent)
            embeddings.append(embedding)
        return torch.stack(latents, dim=-2), torch.stack(embeddings, dim=-2)
