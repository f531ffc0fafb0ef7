"""What every proposer is: something that guesses the next tokens and says how it drew them."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens with the exact distribution they came from.

    Attributes:
        tokens: L ids, for the positions after the anchor.
        probs: float32 `[L, V]` that they were drawn from; None where nothing was drawn (lookup,
            greedy), which verification reads as certainty.
        confidence: `[L]` logits of the confidence head, if there is one.
    """

    tokens: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None
    confidence: torch.Tensor | None = None


class Proposer(Protocol):
    """One request at a time: `start`, then `observe` and `propose` in turn.

    Attributes:
        taps: target layers whose outputs `observe` wants, () for none.
    """

    taps: tuple[int, ...]

    def start(self, prompt: list[int]) -> None:
        """Forget the request before; a request with these prompt ids begins."""

    def observe(self, features: torch.Tensor | None, tokens: list[int]) -> None:
        """The target's cache has grown by `tokens`.

        Called after every target pass, whether or not anything was proposed for it.

        Args:
            features: `[1, n, M·D]` outputs of the tapped layers there, None without taps.
            tokens: the n ids at these positions.
        """

    def propose(
        self, tokens: list[int], settings: SamplingSettings, randomness: Randomness, limit: int
    ) -> Proposal:
        """Guess at most `limit` (1 or more) tokens after `tokens`, whose last one is the anchor."""
