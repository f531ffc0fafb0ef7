"""Draws drafts one token after the other, and remembers what they were drawn from."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows, most_likely, warp_rows


def drafted_with(settings: SamplingSettings) -> SamplingSettings:
    """How drafts of a request are drawn: as its tokens, or as its verdict takes most of them."""
    # A draft x must match an independent draw, which happens with target_probs[x]. The most likely
    # token makes that largest if the drafter is right; drawing x would only reach its mean over x.
    return SamplingSettings() if settings.verdict == "matching" else settings


class Drawing:
    """The drafts of one round for n requests.

    Args:
        requests: n of them.
        sampler: temperature and filters of the drafts; None: those of each request, or its
            verdict's. Any are exact, since a proposal says what it was drawn from.
        draft_ids: `[Vd]` ascending target ids of the columns of the logits; None: they are those
            of the target's usable vocabulary.
        vocabulary: V, the size of that; needed with `draft_ids` only.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        sampler: SamplingSettings | None,
        draft_ids: torch.Tensor | None = None,
        vocabulary: int = 0,
    ) -> None:
        self.requests, self.draft_ids, self.vocabulary = requests, draft_ids, vocabulary
        self.settings = [sampler or drafted_with(request.settings) for request in requests]
        self.greedy = all(one.greedy for one in self.settings)
        self.processed = any(request.processors for request in requests)
        self._chosen: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []

    def next(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the next draft of every request from the drafter's logits `[n, Vd]`; ids `[n]`."""
        if self.processed:  # what bans and biases know are the target's ids
            logits = self._process(
                over_target(logits, self.draft_ids, self.vocabulary, float("-inf"))
            )
        if self.greedy:
            tokens = most_likely(logits)
        else:
            uniforms = [request.proposing(len(self._chosen)) for request in self.requests]
            self._probs.append(warp_rows(logits, self.settings))
            tokens = draw_rows(self._probs[-1], uniforms)
        if self.draft_ids is not None and not self.processed:
            tokens = self.draft_ids[tokens]
        self._chosen.append(tokens)
        return tokens

    def proposals(
        self, limits: Sequence[int], confidence: torch.Tensor | None = None
    ) -> list[Proposal]:
        """What was drawn, cut to `limits`; `confidence` are logits `[n, P]`."""
        tokens = torch.stack(self._chosen, dim=1).tolist()
        probs = torch.stack(self._probs, dim=1) if self._probs else None
        if probs is not None and not self.processed:
            probs = over_target(probs, self.draft_ids, self.vocabulary, 0.0)
        return [
            Proposal(
                tokens[i],
                None if probs is None or settings.greedy else probs[i],
                None if confidence is None else confidence[i],
            ).cut(limit)
            for i, (settings, limit) in enumerate(zip(self.settings, limits, strict=True))
        ]

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` as the target's will be: each behind its tokens and drafts so far."""
        drafts = [[]] * len(self.requests)
        if self._chosen:
            drafts = torch.stack(self._chosen, dim=1).tolist()
        rows = [
            request.process(logits[i : i + 1], drafts[i], len(self._chosen))
            for i, request in enumerate(self.requests)
        ]
        return allowed_if_any(torch.cat(rows), logits)


def allowed_if_any(allowed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Rows `[..., V]` of `allowed`, those of `logits` where nothing that can be drafted is allowed:
    a draft of these will be rejected, whatever it is."""
    return torch.where(allowed.isneginf().all(-1, keepdim=True), logits, allowed)


def over_target(
    values: torch.Tensor, draft_ids: torch.Tensor | None, vocabulary: int, rest: float
) -> torch.Tensor:
    """`values` `[..., Vd]` over the target's vocabulary `[..., V]`, `rest` for other tokens."""
    if draft_ids is None:
        return values
    full = values.new_full((*values.shape[:-1], vocabulary), rest)
    return full.index_copy_(-1, draft_ids, values)
