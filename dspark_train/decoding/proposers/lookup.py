"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023)."""

from collections.abc import Sequence

from dspark_train.decoding.proposers.base import Proposal, Stateless
from dspark_train.decoding.request import Request


class LookupProposer(Stateless):
    """Copies what followed the latest earlier occurrence of the longest known suffix.

    It looks in each request's own prompt and output only, and needs no training. Nothing is drawn,
    so its proposals are certain (probs None).

    Args:
        num_tokens: how many tokens it copies at most.
        longest, shortest: lengths of the suffixes that it looks for.

    Raises:
        ValueError: lengths out of order.
    """

    def __init__(self, num_tokens: int = 8, longest: int = 4, shortest: int = 2) -> None:
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"num_tokens={num_tokens}, longest={longest}, shortest={shortest}: expected at "
                "least one token and 1 <= shortest <= longest"
            )
        self.num_tokens, self.longest, self.shortest = num_tokens, longest, shortest
        self.open(1)

    def open(self, rows: int) -> None:
        self._indices = [_SuffixIndex(self.longest, self.shortest) for _ in range(rows)]

    def start(self, row: int) -> None:
        self._indices[row] = _SuffixIndex(self.longest, self.shortest)

    def move(self, source: int, destination: int) -> None:
        self._indices[destination] = self._indices[source]
        self.start(source)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        proposals = []
        for index, request, limit in zip(self._indices, requests, limits, strict=False):
            after = index.find(request.tokens)
            end = after + min(self.num_tokens, limit)
            proposals.append(Proposal(request.tokens[after:end]))
        return proposals


class _SuffixIndex:
    """Where each n-gram of one text was last followed by something."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, tokens: list[int]) -> int:
        """Place after the latest earlier occurrence of the longest suffix; the end if none."""
        # an n-gram counts once a token follows it: the suffix itself must not be found
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            after = self._after.get(tuple(tokens[-n:]))
            if after is not None:
                return after
        return len(tokens)
