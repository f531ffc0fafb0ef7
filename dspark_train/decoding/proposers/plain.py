"""Plain decoding: the target alone, one token a round."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.request import Request


class PlainProposer:
    """Proposes nothing."""

    taps: tuple[int, ...] = ()

    def open(self, rows: int) -> None:
        pass

    def start(self, row: int) -> None:
        pass

    def move(self, source: int, destination: int) -> None:
        pass

    def observe(
        self, first: int, requests: Sequence[Request], features: torch.Tensor | None, counts: list
    ) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [Proposal() for _ in requests]
