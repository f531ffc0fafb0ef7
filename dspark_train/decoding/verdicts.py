"""From the logits of one target pass to what every request of the batch commits."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import draw_rows, most_likely, warp_rows
from dspark_train.decoding.verify import verify, verify_greedy


def decide(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[tuple[int, int]]:
    """Per request: how many drafts stand, and the token after them.

    Args:
        requests: n of them, before anything of this round is committed.
        logits: `[N, V]`, for a request with L drafts L + 1 rows: for its first draft, …, for the
            token after its last one.
        proposals: what was drafted.
    """
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    if all(request.settings.greedy for request in requests):
        choices = iter(most_likely(logits).tolist())
        return [
            verify_greedy([next(choices) for _ in range(count)], proposal.tokens)
            for count, proposal in zip(counts, proposals, strict=True)
        ]
    settings = [
        request.settings
        for request, count in zip(requests, counts, strict=True)
        for _ in range(count)
    ]
    target_rows = warp_rows(logits, settings).split(counts)
    accepted, next_probs, uniforms = [], [], []
    for request, proposal, rows in zip(requests, proposals, target_rows, strict=True):
        first, uniform = len(request.tokens), request.randomness.uniform
        numbers = [uniform(first + i, "accept") for i in range(len(proposal.tokens))]
        verdict = verify(rows, proposal.tokens, proposal.probs, numbers)
        accepted.append(verdict.accepted)
        next_probs.append(verdict.next_probs)
        uniforms.append(uniform(first + verdict.accepted, "resample"))
    tokens = draw_rows(torch.stack(next_probs), uniforms).tolist()
    return list(zip(accepted, tokens, strict=True))
