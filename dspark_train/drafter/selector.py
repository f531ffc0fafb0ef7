"""DFlash2's candidate selector: a sequential head that ranks the best unary candidates anew."""

import torch
from torch import nn

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.markov import Latent, MarkovHead, State


class CandidateSelector(MarkovHead):
    """Selector: `z = A[x_{t-1}] ⊙ (H h)`, so `score(c) = u(c) + ⟨z, B[c]⟩` (DFlash2).

    A is `markov_w1`, B is `markov_w2`. Only the `selector_top_k` candidates with the best unary
    logits can be drafted. The loss reads the softmax over all tokens, of which the walk keeps the
    candidates: the set is no function of the parameters that a gradient could follow.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.hidden_projection = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.top_k = config.selector_top_k

    def latent(self, state: State, previous: torch.Tensor, hidden: torch.Tensor) -> Latent:
        embedding = self.markov_w1(previous)
        return embedding * self.hidden_projection(hidden), embedding, state

    def candidates(self, unary: torch.Tensor) -> torch.Tensor:
        best = unary.topk(min(self.top_k, unary.shape[-1]), dim=-1)
        nothing = torch.full_like(unary, float("-inf"))
        return nothing.scatter(-1, best.indices, best.values)
