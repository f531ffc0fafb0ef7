"""Decisions with a fault planted, which a certificate has to find before it may be believed."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.verdicts import Decision, decide


def accepts_everything(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[Decision]:
    """Every draft stands; only the token after the last one is the target's."""
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    last = torch.stack([rows[-1] for rows in logits.split(counts)])
    bonus = decide(requests, last, [Proposal()] * len(requests))
    return [
        Decision(len(proposal.tokens), [*proposal.tokens, *one.tokens])
        for proposal, one in zip(proposals, bonus, strict=True)
    ]


def misremembers_the_drafter(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[Decision]:
    """Sampled drafts are judged by other probabilities than they were drawn from."""
    return decide(requests, logits, [_sharpened(proposal) for proposal in proposals])


def _sharpened(proposal: Proposal) -> Proposal:
    if proposal.probs is None:
        return proposal
    squares = proposal.probs**2
    return replace(proposal, probs=squares / squares.sum(-1, keepdim=True))


def reads_the_row_before(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[Decision]:
    """The target's rows are off by one."""
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    shifted = torch.cat([rows.roll(1, 0) for rows in logits.split(counts)])
    return decide(requests, shifted, proposals)


FAULTS = {fault.__name__: fault for fault in (
    accepts_everything, misremembers_the_drafter, reads_the_row_before
)}  # fmt: skip
