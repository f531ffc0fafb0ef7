"""Draws drafts one token after the other, and remembers what they were drawn from."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows, most_likely, warp_rows


class Drawing:
    """The drafts of one round for n requests.

    Args:
        requests: n of them.
        sampler: temperature and filters of the drafts; None: those of each request. Any are exact,
            since a proposal says what it was drawn from.
    """

    def __init__(self, requests: Sequence[Request], sampler: SamplingSettings | None) -> None:
        self.requests = requests
        self.settings = [sampler or request.settings for request in requests]
        self.greedy = all(one.greedy for one in self.settings)
        self.processed = any(request.processors for request in requests)
        self._chosen: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []

    def next(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the next draft of every request from the drafter's logits `[n, V]`; ids `[n]`."""
        if self.processed:
            logits = self._process(logits)
        if self.greedy:
            tokens = most_likely(logits)
        else:
            uniforms = [request.proposing(len(self._chosen)) for request in self.requests]
            self._probs.append(warp_rows(logits, self.settings))
            tokens = draw_rows(self._probs[-1], uniforms)
        self._chosen.append(tokens)
        return tokens

    def proposals(
        self, limits: Sequence[int], confidence: torch.Tensor | None = None
    ) -> list[Proposal]:
        """What was drawn, cut to `limits`; `confidence` are logits `[n, P]`."""
        tokens = torch.stack(self._chosen, dim=1).tolist()
        probs = torch.stack(self._probs, dim=1) if self._probs else None
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
        allowed = torch.cat(rows)
        # nothing that can be drafted is allowed: the draft will be rejected, whatever it is
        return torch.where(allowed.isneginf().all(-1, keepdim=True), logits, allowed)
