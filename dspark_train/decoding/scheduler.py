"""How many drafts of each request enter the target pass.

A round asks twice: before drafting, how many tokens each request may draft, and after drafting,
how many of them are verified. Exactness needs *non-anticipation*: whether draft k of a request is
verified may depend on everything before it, but neither on draft k itself nor on what follows.
"""

from collections.abc import Sequence
from typing import Protocol

from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.stats import Round


class Scheduler(Protocol):
    """A policy. Lists are in the order of the requests; one entry a request."""

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that each request may draft in this round, 0 for none.

        The engine lowers them to what a request can still commit.
        """

    def schedule(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        """Verify lengths: how many leading drafts of each proposal enter the target pass."""

    def observe(self, requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        """What became of the round that was scheduled last."""


class Fixed:
    """The same verify length for every request in every round.

    Args:
        length: drafts that are made and verified; None verifies all that the proposer drafts.

    Raises:
        ValueError: a negative length.
    """

    def __init__(self, length: int | None = None) -> None:
        if length is not None and length < 0:
            raise ValueError(f"length={length}, expected 0 or more, or None for whole proposals")
        self.length = length

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return [request.remaining if self.length is None else self.length for request in requests]

    def schedule(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens) for proposal in proposals]

    def observe(self, requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        pass
