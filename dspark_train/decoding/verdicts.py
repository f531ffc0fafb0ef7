"""From the logits of one target pass to what every request of the batch commits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_train.decoding.logprobs import TokenLogprobs, token_logprobs
from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request, RequestError
from dspark_train.decoding.sampling import draw_rows, most_likely, warp_rows
from dspark_train.decoding.stats import Round, Seconds
from dspark_train.decoding.verify import chances, overlap, verify, verify_greedy

# accepted drafts, the token after them, overlaps of a traced request
Verdict = tuple[int, int, list[float] | None]


@dataclass(frozen=True)
class Decision:
    """`accepted` drafts of a request stand; `tokens` are these and the one after them.

    Attributes:
        logprobs: of `tokens`; None where the request does not ask for them.
        overlap: of a traced request, per draft the exact chance that it stands once those before
            it do; else None.
    """

    accepted: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    overlap: list[float] | None = None

    def judged(self, proposal: Proposal) -> int:
        """Drafts whose verdict is known: those that stand, and the rejected one."""
        return min(self.accepted + 1, len(proposal.tokens))


def decide(
    requests: Sequence[Request], logits: torch.Tensor, proposals: Sequence[Proposal]
) -> list[Decision]:
    """What every request commits.

    Args:
        requests: n of them, before anything of this round is committed.
        logits: `[N, V]`, for a request with L drafts L + 1 rows: for its first draft, …, for the
            token after its last one.
        proposals: what was drafted.
    """
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    processed = _processed(requests, logits, proposals, counts)
    greedy = all(request.settings.greedy for request in requests)
    if greedy:
        probs = [None] * len(requests)
        found = _greedy(requests, processed, proposals, counts)
    else:
        settings = [
            request.settings
            for request, count in zip(requests, counts, strict=True)
            for _ in range(count)
        ]
        probs = warp_rows(processed, settings).split(counts)
        found = _sampled(requests, processed.split(counts), probs, proposals)
    decisions = []
    for request, proposal, rows, drawn_from, (accepted, token, traced) in zip(
        requests, proposals, logits.split(counts), probs, found, strict=True
    ):
        tokens, logprobs = [*proposal.tokens[:accepted], token], None
        if request.logprobs is not None:
            logprobs = token_logprobs(rows, drawn_from, tokens, request.logprobs)
        decisions.append(Decision(accepted, tokens, logprobs, traced))
    return decisions


def _processed(
    requests: Sequence[Request],
    logits: torch.Tensor,
    proposals: Sequence[Proposal],
    counts: Sequence[int],
) -> torch.Tensor:
    """Logits after the processors of each request; every row sees the drafts before it."""
    if not any(request.processors for request in requests):
        return logits
    return torch.cat(
        [
            request.process(rows, proposal.tokens)
            for request, proposal, rows in zip(
                requests, proposals, logits.split(counts), strict=True
            )
        ]
    )


def refuse_dead_end(request: Request, row: torch.Tensor) -> None:
    """The row that the next token comes from must not be empty; others may follow bad drafts."""
    if request.processors and not bool(row.isfinite().any()):
        raise RequestError(request, "its bans and biases leave no token to go on with")


def _greedy(
    requests: Sequence[Request],
    logits: torch.Tensor,
    proposals: Sequence[Proposal],
    counts: Sequence[int],
) -> list[Verdict]:
    choices, found = iter(most_likely(logits).tolist()), []
    for request, proposal, rows in zip(requests, proposals, logits.split(counts), strict=True):
        chosen = [next(choices) for _ in rows]
        accepted, token = verify_greedy(chosen, proposal.tokens)
        refuse_dead_end(request, rows[accepted])
        same = zip(proposal.tokens, chosen, strict=False)
        traced = [float(draft == choice) for draft, choice in same] if request.traced else None
        found.append((accepted, token, traced))
    return found


def _sampled(
    requests: Sequence[Request],
    logits: Sequence[torch.Tensor],
    probs: Sequence[torch.Tensor],
    proposals: Sequence[Proposal],
) -> list[Verdict]:
    found: list[Verdict | None] = [None] * len(requests)
    resampled, next_probs, uniforms = [], [], []
    drafted = [p.tokens for p in proposals], [p.probs for p in proposals]
    pairs = chances(probs, *drafted)
    for i, (request, proposal, raw, rows) in enumerate(
        zip(requests, proposals, logits, probs, strict=True)
    ):
        if request.settings.verdict == "matching":
            found[i] = matching(request, raw, rows, proposal)
            continue
        first, uniform = len(request.tokens), request.randomness.uniform
        numbers = [uniform(first + i, "accept") for i in range(len(proposal.tokens))]
        verdict = verify(rows, proposal.tokens, proposal.probs, numbers, pairs[i])
        refuse_dead_end(request, raw[verdict.accepted])
        traced = overlap(rows, proposal.tokens, proposal.probs) if request.traced else None
        resampled.append((i, verdict.accepted, traced))
        next_probs.append(verdict.next_probs)
        uniforms.append(uniform(first + verdict.accepted, "resample"))
    if resampled:
        tokens = draw_rows(torch.stack(next_probs), uniforms).tolist()
        for (i, accepted, traced), token in zip(resampled, tokens, strict=True):
            found[i] = accepted, token, traced
    return found


def matching(
    request: Request, raw: torch.Tensor, rows: torch.Tensor, proposal: Proposal
) -> Verdict:
    """Draw the target's own token at every position; the drafts that are these tokens stand.

    Each is drawn with the number of its position, whatever was drafted: so what is committed is a
    function of the target and the seed alone.
    """
    if request.processors:  # a row behind a draft that nobody would emit may be empty
        rows = torch.where(raw.isfinite().any(-1, keepdim=True), rows, torch.ones_like(rows))
    first, uniform = len(request.tokens), request.randomness.uniform
    drawn = draw_rows(rows, [uniform(first + i, "target") for i in range(len(rows))]).tolist()
    accepted, token = verify_greedy(drawn, proposal.tokens)
    refuse_dead_end(request, raw[accepted])
    return accepted, token, overlap(rows, proposal.tokens, None) if request.traced else None


def round_of(proposal: Proposal, decision: Decision, kept: int, seconds: Seconds) -> Round:
    """What happened to a request in a round.

    Args:
        proposal: the drafts that entered the target pass.
        decision: the verdict on them.
        kept: tokens that were committed.
        seconds: its share of them.
    """
    stood = min(decision.accepted, kept)
    return Round(
        proposed=len(proposal.tokens),
        accepted=stood,
        judged=stood if kept <= decision.accepted else decision.judged(proposal),
        committed=kept,
        confidence=None if proposal.confidence is None else proposal.confidence.tolist(),
        seconds=seconds,
        overlap=decision.overlap,
    )
