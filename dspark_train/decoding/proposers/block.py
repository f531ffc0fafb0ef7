"""The block drafter as a proposer: one parallel pass, then a walk of the sequential head."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from dspark_train.blocks import ContextSpan
from dspark_train.decoding.cache import DraftCache
from dspark_train.decoding.cache_layer import KeysValues
from dspark_train.decoding.compiling import cut
from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.proposers.drawing import Drawing, FixedDrawing
from dspark_train.decoding.recording import Recorder, Work, room, tier
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.drafter import Drafter
from dspark_train.target import TargetHead


@dataclass(frozen=True)
class FixedBlock:
    """One shape: what changes from round to round, and the work.

    Attributes:
        anchors: `[n, 1, 2]` token and position of each.
        temperatures, uniforms: of `FixedDrawing`.
        work: see `BlockProposer._recorded`.
    """

    anchors: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor
    work: Work


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
        recorder: for all of a round's drafting, which then has fixed shapes; None: shapes as they
            come. With filters or processors the walk is not in it.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        vocabulary: int | None = None,
        use_heads: bool = True,
        sampler: SamplingSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        config = drafter.config
        self.drafter, self.head = drafter.eval(), head
        self.vocabulary, self.draft_ids = vocabulary or head.vocab_size, drafter.draft_ids
        self.draft_head = head
        if self.draft_ids is not None:
            if (last := int(self.draft_ids.max())) >= self.vocabulary:
                raise ValueError(
                    f"the drafter can propose token {last}, but the target's "
                    f"tokenizer has {self.vocabulary}: its d2t belongs to another target"
                )
            self.draft_head = head.restricted(self.draft_ids)
        self.taps = tuple(config.target_layer_ids)
        self.markov = drafter.markov_head if use_heads else None
        # a confidence that was trained on drafts of the sequential head says nothing without it
        self.confidence = drafter.confidence_head if use_heads else None
        shifts = config.confidence_shifts or [0.0] * config.slots.num_proposals
        self.shifts = torch.tensor(shifts, device=drafter.device)
        self.sampler, self.walked = sampler, 0.0
        self.recorder = recorder
        self.open(1)

    def open(self, rows: int) -> None:
        self.cache = DraftCache(self.drafter.config.num_hidden_layers, rows)
        if self.recorder is not None:
            self.recorder.clear()

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

    def audit(self, row: int, tokens: Sequence[int], features: torch.Tensor | None) -> float:
        fresh = DraftCache(self.drafter.config.num_hidden_layers)
        positions = torch.arange(len(tokens), device=features.device)[None]
        fresh.append(self.drafter.context_kv(features, positions), [len(tokens)])
        return self.cache.difference(row, fresh)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        drawing, slots = (
            Drawing(requests, self.sampler, self.draft_ids, self.vocabulary),
            max(limits),
        )
        if self.recorder is not None and not drawing.filtered:
            tokens, probs, confidence = self._recorded(self._anchors(requests), drawing, slots)
            drawing.take(tokens, probs)
            return drawing.proposals(limits, confidence)
        hidden = self._block(requests)[:, :slots]
        logits = self._unary(hidden)
        began = perf_counter()
        anchors = torch.tensor([request.tokens[-1] for request in requests], device=hidden.device)
        confidence = self._walk(drawing, anchors, logits, hidden)
        self.walked += perf_counter() - began
        return drawing.proposals(limits, confidence)

    def _anchors(self, requests: Sequence[Request]) -> list[list[tuple[int, int]]]:
        """Token and position of every anchor, one of a request."""
        self.cache.activate(0, len(requests))
        for length, request in zip(self.cache.active_lengths, requests, strict=True):
            if length != len(request.tokens) - 1:
                raise RuntimeError(
                    f"the drafter's cache holds {length} positions, expected the "
                    f"{len(request.tokens) - 1} before the anchor: every target pass must be "
                    "observed"
                )
        return [[(request.tokens[-1], len(request.tokens) - 1)] for request in requests]

    def _block(self, requests: Sequence[Request]) -> torch.Tensor:
        """Hidden states `[n, P, D]` of the slots that propose."""
        anchors = self._anchors(requests)
        if self.recorder is not None:
            return self._recorded(anchors)[: len(anchors)]
        device = self.head.projection.weight.device
        tokens, places = torch.tensor(anchors, device=device).unbind(-1)
        return self._slots(tokens, places, self.cache.context(), self.cache.visible(device))

    def _slots(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        context: list[KeysValues],
        span: ContextSpan | None,
    ) -> torch.Tensor:
        """Hidden states `[n, P, D]` behind anchors `[n, 1]` at positions `[n, 1]`."""
        slots = self.drafter.slots
        ids = slots.inputs(tokens, self.drafter.config.mask_token_id)
        hidden = self.drafter.backbone(self.head.embed(ids), slots.positions(places), context, span)
        return hidden[:, 0, slots.proposing]

    def _recorded(
        self, anchors: list[list[tuple[int, int]]], drawing: Drawing | None = None, slots: int = 0
    ) -> Any:
        """Work that is padded to the next tier of rows, of context and of slots.

        Without `drawing` it gives hidden states as `_slots`; with it `FixedDrawing.all` of at least
        so many slots, and confidence logits as `_walk`. All are overwritten by the next round.
        """
        cache, count = self.cache, len(anchors)
        n = tier(count, cache.num_rows)
        end = room(cache, max(cache.active_lengths))
        slots = tier(slots, self.drafter.slots.num_proposals) if drawing else 0
        sampled = drawing is not None and not drawing.greedy

        def make() -> FixedBlock:
            device = self.recorder.device
            given = torch.zeros(n, 1, 2, dtype=torch.long, device=device)
            temperatures = torch.zeros(n, device=device)
            uniforms = torch.zeros(n, slots, dtype=torch.float64, device=device)
            tokens, places = given.unbind(-1)
            cache.activate(0, n)
            context, span = cache.context(end), ContextSpan(torch.zeros_like(places), places)
            cache.activate(0, count)

            def work() -> Any:
                hidden = self._slots(tokens, places, context, span)
                if not slots:
                    return hidden
                hidden = hidden[:, :slots]
                draws = (temperatures, uniforms) if sampled else (None, None)
                drawn = FixedDrawing(self.draft_ids, *draws)
                confidence = self._walk(drawn, tokens[:, 0], self._unary(hidden), hidden)
                return *drawn.all(), confidence

            return FixedBlock(given, temperatures, uniforms, self.recorder.record(work))

        fixed: FixedBlock = self.recorder.get((n, end, slots, sampled), make, cache.capacity)
        fixed.anchors.copy_(torch.tensor(anchors + [[(0, 0)]] * (n - count)))
        if sampled:
            fixed.temperatures[:count] = torch.tensor([one.temperature for one in drawing.settings])
            fixed.uniforms[:count] = drawing.uniforms(slots)
        return fixed.work()

    def _unary(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the drafter's own vocabulary, without padding of the LM head."""
        logits = self.draft_head.logits(hidden).float()
        return logits if self.draft_ids is not None else logits[..., : self.vocabulary]

    def _walk(
        self,
        drawing: Drawing | FixedDrawing,
        anchors: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        """Left to right from anchors `[n]`; each slot's bias sees the token drawn before it.

        Returns confidence logits `[n, P]`, None without a confidence head.
        """
        previous, state, embeddings = anchors, None, []
        if self.markov is not None:
            state, logits = self.markov.start(hidden[:, 0]), self.markov.candidates(logits)
        for unary, slot in zip(logits.unbind(1), hidden.unbind(1), strict=True):
            cut()
            biased = unary
            if self.markov is not None:
                bias, embedding, state = self.markov.step(state, previous, slot)
                biased = unary + bias[:, : unary.shape[1]]
                embeddings.append(embedding)
            previous = drawing.next(biased)
        if self.confidence is None:
            return None
        cut()
        given = torch.stack(embeddings, dim=1) if embeddings else None
        logits = self.confidence.logits(hidden, given).float()
        return logits + self.shifts[: logits.shape[1]]
