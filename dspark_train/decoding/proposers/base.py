"""What every proposer is: something that guesses the next tokens and says how it drew them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dspark_train.decoding.request import Request


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

    def cut(self, length: int) -> "Proposal":
        """The first `length` drafts."""
        if length >= len(self.tokens):
            return self
        probs = None if self.probs is None else self.probs[:length]
        confidence = None if self.confidence is None else self.confidence[:length]
        return Proposal(self.tokens[:length], probs, confidence)


class Proposer(Protocol):
    """Guesses for the rows of a batch. Row i belongs to one request from `start` on.

    Attributes:
        taps: target layers whose outputs `observe` wants, () for none.
        walked: seconds spent in walks of a sequential head so far.
    """

    taps: tuple[int, ...]
    walked: float

    def open(self, rows: int) -> None:
        """Have room for requests in `rows` rows; what was held before is forgotten."""

    def start(self, row: int) -> None:
        """Forget the request that was in `row`; another one begins there."""

    def move(self, source: int, destination: int) -> None:
        """The request in row `source` goes on in row `destination`."""

    def observe(
        self, first: int, requests: Sequence[Request], features: torch.Tensor | None, counts: list
    ) -> None:
        """The target's cache has grown: by `counts[i]` positions in row `first + i`.

        Called after every target pass for every row of it, whether or not anything was proposed
        there.

        Args:
            first: row of the first request.
            requests: n requests in consecutive rows.
            features: `[n, q, M·D]` outputs of the tapped layers, None without taps. Only the first
                `counts[i]` columns of row i stand.
            counts: positions per row, at most q.
        """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        """Guess what follows the tokens of each request, whose last one is the anchor.

        Args:
            requests: those in rows 0, 1, …
            limits: how many tokens each may draft at most, 0 included.
        """

    def audit(self, row: int, tokens: Sequence[int], features: torch.Tensor | None) -> float:
        """Largest relative difference of what `row` holds to a fresh reading of `tokens`.

        Args:
            tokens: what the target's cache holds in that row.
            features: `[1, len(tokens), M·D]` of a fresh pass, None without taps.

        Raises:
            ValueError: it holds another number of positions than it must.
        """


class Stateless:
    """What proposers without caches share."""

    taps: tuple[int, ...] = ()
    walked = 0.0

    def open(self, rows: int) -> None:
        """Nothing to make room for."""

    def start(self, row: int) -> None:
        """Nothing to forget."""

    def move(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def observe(
        self, first: int, requests: Sequence[Request], features: torch.Tensor | None, counts: list
    ) -> None:
        """Nothing to keep."""

    def audit(self, row: int, tokens: Sequence[int], features: torch.Tensor | None) -> float:
        """Nothing to compare."""
        return 0.0
