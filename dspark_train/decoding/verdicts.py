"""From the logits of one target pass to what every request of the batch commits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import draw_rows, most_likely, warp_rows
from dspark_train.decoding.verify import overlap, verify, verify_greedy


class Decision(NamedTuple):
    """How many drafts stand, and the token after them.

    `overlap`: of a traced request, per draft the exact chance that it stands once those before it
    do; else None.
    """

    accepted: int
    token: int
    overlap: list[float] | None = None


def decide(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[Decision]:
    """The verdict on every request's proposal.

    Args:
        requests: n of them, before anything of this round is committed.
        logits: `[N, V]`, for a request with L drafts L + 1 rows: for its first draft, …, for the
            token after its last one.
        proposals: what was drafted.
    """
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    if all(request.settings.greedy for request in requests):
        decisions, choices = [], iter(most_likely(logits).tolist())
        for request, count, proposal in zip(requests, counts, proposals, strict=True):
            chosen = [next(choices) for _ in range(count)]
            same = zip(proposal.tokens, chosen, strict=False)
            traced = [float(draft == choice) for draft, choice in same] if request.traced else None
            decisions.append(Decision(*verify_greedy(chosen, proposal.tokens), traced))
        return decisions
    settings = [
        request.settings
        for request, count in zip(requests, counts, strict=True)
        for _ in range(count)
    ]
    target_rows = warp_rows(logits, settings).split(counts)
    accepted, next_probs, uniforms, overlaps = [], [], [], []
    for request, proposal, rows in zip(requests, proposals, target_rows, strict=True):
        first, uniform = len(request.tokens), request.randomness.uniform
        numbers = [uniform(first + i, "accept") for i in range(len(proposal.tokens))]
        verdict = verify(rows, proposal.tokens, proposal.probs, numbers)
        accepted.append(verdict.accepted)
        next_probs.append(verdict.next_probs)
        uniforms.append(uniform(first + verdict.accepted, "resample"))
        traced = overlap(rows, proposal.tokens, proposal.probs) if request.traced else None
        overlaps.append(traced)
    tokens = draw_rows(torch.stack(next_probs), uniforms).tolist()
    return [Decision(*one) for one in zip(accepted, tokens, overlaps, strict=True)]
