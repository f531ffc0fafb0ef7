"""The block drafter as a proposer: one parallel pass, then a walk of the sequential head."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.cache import DraftCache
from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows, most_likely, warp_rows
from dspark_train.drafter import Drafter
from dspark_train.target import TargetHead


class BlockProposer:
    """Proposes with a `Drafter`, either block convention, any sequential head.

    All requests of a batch share one drafter pass and one walk.

    Args:
        drafter: in the dtype and on the device of the target.
        head: the target's embedding and LM head.
        vocabulary: ids from here on get no mass (padding of the LM head); None: all rows count.
        use_heads: False drafts every slot on its own, without the sequential head.
        sampler: temperature and filters of the drafts; None: those of each request. Any are exact,
            since a proposal says what it was drawn from.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        vocabulary: int | None = None,
        use_heads: bool = True,
        sampler: SamplingSettings | None = None,
    ) -> None:
        config = drafter.config
        self.drafter, self.head, self.vocabulary = drafter.eval(), head, vocabulary
        self.draft_ids = drafter.draft_ids
        self.draft_head = head if self.draft_ids is None else head.restricted(self.draft_ids)
        self.taps = tuple(config.target_layer_ids)
        self.markov = drafter.markov_head if use_heads else None
        # a confidence that was trained on drafts of the sequential head says nothing without it
        self.confidence = drafter.confidence_head if use_heads else None
        self.sampler = sampler
        self.open(1)

    def open(self, rows: int) -> None:
        self.cache = DraftCache(self.drafter.config.num_hidden_layers, rows)

    def start(self, row: int) -> None:
        self.cache.activate(row, row + 1)
        self.cache.truncate([0])

    def move(self, source: int, destination: int) -> None:
        self.cache.move_row(source, destination)

    def observe(
        self, first: int, requests: Sequence[Request], features: torch.Tensor | None, counts: list
    ) -> None:
        self.cache.activate(first, first + len(requests))
        features, device = features[:, : max(counts)], features.device
        starts = torch.tensor(self.cache.active_lengths, device=device)
        positions = starts[:, None] + torch.arange(features.shape[1], device=device)
        self.cache.append(self.drafter.context_kv(features, positions), counts)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        self.cache.activate(0, len(requests))
        for length, request in zip(self.cache.active_lengths, requests, strict=True):
            if length != len(request.tokens) - 1:
                raise RuntimeError(
                    f"the drafter's cache holds {length} positions, expected the "
                    f"{len(request.tokens) - 1} before the anchor: every target pass must be "
                    "observed"
                )
        hidden = self._block(requests)[:, : max(limits)]
        logits = self._unary(hidden)
        tokens, probs, confidence = self._walk(requests, logits, hidden)
        proposals = []
        for i, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            drawn = None if probs is None or self._settings(request).greedy else probs[i]
            logit = None if confidence is None else confidence[i]
            proposals.append(Proposal(tokens[i], drawn, logit).cut(limit))
        return proposals

    def _block(self, requests: Sequence[Request]) -> torch.Tensor:
        """Hidden states `[n, P, D]` of the slots that propose."""
        slots, device = self.drafter.slots, self.head.projection.weight.device
        anchors = [[(request.tokens[-1], len(request.tokens) - 1)] for request in requests]
        tokens, places = torch.tensor(anchors, device=device).unbind(-1)
        ids = slots.inputs(tokens, self.drafter.config.mask_token_id)
        context, span = self.cache.context(), self.cache.visible(device)
        positions = slots.positions(places)
        hidden = self.drafter.backbone(self.head.embed(ids), positions, context, span)
        return hidden[:, 0, slots.proposing]

    def _unary(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the drafter's own vocabulary, without padding of the LM head."""
        logits = self.draft_head.logits(hidden).float()
        if self.draft_ids is None:
            return logits[..., : self.vocabulary]
        if self.vocabulary is None:
            return logits
        return logits.masked_fill(self.draft_ids >= self.vocabulary, float("-inf"))

    def _settings(self, request: Request) -> SamplingSettings:
        return self.sampler or request.settings

    def _processed(
        self, logits: torch.Tensor, requests: Sequence[Request], chosen: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Logits `[n, V]` as the target's will be: each behind its tokens and drafts so far."""
        drafts = torch.stack(tuple(chosen), dim=1).tolist() if chosen else [[]] * len(requests)
        rows = [
            r.process(logits[i : i + 1], drafts[i], len(chosen)) for i, r in enumerate(requests)
        ]
        allowed = torch.cat(rows)
        # nothing that can be drafted is allowed: the draft will be rejected, whatever it is
        return torch.where(allowed.isneginf().all(-1, keepdim=True), logits, allowed)

    def _over_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` over the target's usable vocabulary: the rest has no mass."""
        if self.draft_ids is None:
            return logits
        full = logits.new_full((len(logits), self.head.vocab_size), float("-inf"))
        return full.index_copy(1, self.draft_ids, logits)[:, : self.vocabulary]

    def _walk(
        self, requests: Sequence[Request], logits: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[list[list[int]], torch.Tensor | None, torch.Tensor | None]:
        """Left to right; each slot's bias sees the token that was drawn before it.

        Returns tokens per request, probabilities `[n, P, V]` (None: all greedy) and confidence
        logits `[n, P]`.
        """
        settings = [self._settings(request) for request in requests]
        processed = any(request.processors for request in requests)
        greedy = all(one.greedy for one in settings)
        anchors = [request.tokens[-1] for request in requests]
        previous = torch.tensor(anchors, device=hidden.device)
        state = None
        if self.markov is not None:
            state, logits = self.markov.start(hidden[:, 0]), self.markov.candidates(logits)
        chosen, rows, embeddings = [], [], []
        for slot in range(hidden.shape[1]):
            biased = logits[:, slot]
            if self.markov is not None:
                bias, embedding, state = self.markov.step(state, previous, hidden[:, slot])
                biased = biased + bias[:, : biased.shape[1]]
                embeddings.append(embedding)
            biased = self._over_target(biased)
            if processed:
                biased = self._processed(biased, requests, chosen)
            if greedy:
                previous = most_likely(biased)
            else:
                rows.append(warp_rows(biased, settings))
                previous = draw_rows(rows[-1], [r.proposing(slot) for r in requests])
            chosen.append(previous)
        confidence = None
        if self.confidence is not None:
            given = torch.stack(embeddings, dim=1) if embeddings else None
            confidence = self.confidence.logits(hidden, given)
        tokens = torch.stack(chosen, dim=1).tolist()
        return tokens, torch.stack(rows, dim=1) if rows else None, confidence
