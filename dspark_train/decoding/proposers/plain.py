"""Plain decoding: the target alone, one token a round."""

from collections.abc import Sequence

from dspark_train.decoding.proposers.base import Proposal, Stateless
from dspark_train.decoding.request import Request


class PlainProposer(Stateless):
    """Proposes nothing."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [Proposal() for _ in requests]
