"""Plain decoding: the target alone, one token a round."""

import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings


class PlainProposer:
    """Proposes nothing."""

    taps: tuple[int, ...] = ()

    def start(self, prompt: list[int]) -> None:
        pass

    def observe(self, features: torch.Tensor | None, tokens: list[int]) -> None:
        pass

    def propose(
        self, tokens: list[int], settings: SamplingSettings, randomness: Randomness, limit: int
    ) -> Proposal:
        return Proposal()
