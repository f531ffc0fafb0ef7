"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023)."""

import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings


class LookupProposer:
    """Copies what followed the latest earlier occurrence of the longest known suffix.

    It looks in the request's own prompt and output only, and needs no training. Nothing is drawn,
    so its proposals are certain (probs None).

    Args:
        num_tokens: how many tokens it copies at most.
        longest, shortest: lengths of the suffixes that it looks for.

    Raises:
        ValueError: lengths out of order.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, num_tokens: int = 8, longest: int = 4, shortest: int = 2) -> None:
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"num_tokens={num_tokens}, longest={longest}, shortest={shortest}: expected at "
                "least one token and 1 <= shortest <= longest"
            )
        self.num_tokens, self.longest, self.shortest = num_tokens, longest, shortest
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def start(self, prompt: list[int]) -> None:
        self._after.clear()
        self._indexed = 0

    def observe(self, features: torch.Tensor | None, tokens: list[int]) -> None:
        pass

    def propose(
        self, tokens: list[int], settings: SamplingSettings, randomness: Randomness, limit: int
    ) -> Proposal:
        self._index(tokens)
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            after = self._after.get(tuple(tokens[-n:]))
            if after is not None:
                return Proposal(tokens[after : after + min(self.num_tokens, limit)])
        return Proposal()

    def _index(self, tokens: list[int]) -> None:
        # an n-gram counts once a token follows it: the suffix itself must not be found
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
