"""Draws drafts one token after the other, and remembers what they were drawn from."""

from collections.abc import Sequence

import numpy as np
import torch

from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.randomness import keyed_seed, keyed_uniforms, seed_array
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import (
    SamplingSettings,
    draw_rows,
    drawn_rows,
    has_mass,
    most_likely,
    warp_rows,
)


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
        self.filtered = self.processed or any(one.filtered for one in self.settings)
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

    def uniforms(self, slots: int) -> torch.Tensor:
        """The numbers, float64 `[n, slots]`, that `next` draws with."""
        seeds = seed_array([request.randomness.seed for request in self.requests])
        firsts = np.array([len(request.tokens) for request in self.requests], dtype=np.uint64)
        places = firsts[:, None] + np.arange(slots, dtype=np.uint64)
        keyed = keyed_seed(seeds, firsts - np.uint64(1))
        return torch.from_numpy(keyed_uniforms(keyed[:, None], places, "propose"))

    def take(self, tokens: torch.Tensor, probs: torch.Tensor | None) -> None:
        """Have what a `FixedDrawing` drew for the first n of its rows."""
        count = len(self.requests)
        self._chosen = list(tokens[:count].unbind(1))
        self._probs = [] if probs is None else list(probs[:count].unbind(1))

    def proposals(
        self, limits: Sequence[int], confidence: torch.Tensor | None = None
    ) -> list[Proposal]:
        """What was drawn, cut to `limits`; `confidence` are logits `[n, P]`."""
        tokens = torch.stack(self._chosen, dim=1).tolist()
        if any(token < 0 for row in tokens for token in row):
            raise ValueError(
                "cannot draw drafts: the drafter's logits hold NaN or infinity; its checkpoint is "
                "broken, or was made for another target"
            )
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


class FixedDrawing:
    """Draws as `Drawing` does without processors and filters, and reads nothing on the host.

    Args:
        draft_ids: of `Drawing`.
        temperatures: float32 `[n]`, 0 is greedy; None: all are.
        uniforms: float64 `[n, P]` in [0, 1), for every slot; None with `temperatures` None.
    """

    def __init__(
        self,
        draft_ids: torch.Tensor | None,
        temperatures: torch.Tensor | None,
        uniforms: torch.Tensor | None,
    ) -> None:
        self.draft_ids, self.temperatures = draft_ids, temperatures
        self._uniforms = [] if uniforms is None else list(uniforms.unbind(1))
        self._chosen: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._mass: list[torch.Tensor] = []

    def next(self, logits: torch.Tensor) -> torch.Tensor:
        """As `Drawing.next`."""
        tokens = most_likely(logits)
        if self.temperatures is not None:
            draws = self.temperatures > 0
            probs = (logits / self.temperatures.where(draws, 1.0)[:, None]).softmax(-1)
            drawn, mass = drawn_rows(probs, self._uniforms[len(self._chosen)])
            tokens = drawn.where(draws, tokens)
            self._probs.append(probs)
            self._mass.append(mass.where(draws, 1.0))
        if self.draft_ids is not None:
            tokens = self.draft_ids[tokens]
        self._chosen.append(tokens)
        return tokens

    def all(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids `[n, P]`, -1 where there was nothing to draw from; and what they were drawn from,
        `[n, P, Vd]`."""
        tokens = torch.stack(self._chosen, dim=1)
        if self.temperatures is None:
            return tokens, None
        empty = ~has_mass(torch.stack(self._mass, dim=1))
        return tokens.masked_fill(empty, -1), torch.stack(self._probs, dim=1)


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
