"""A smaller causal model of the same vocabulary as a proposer (Leviathan 2023, Chen 2023)."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.audit import read
from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.proposers.drawing import Drawing
from dspark_train.decoding.ragged import read_ragged
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target


class CausalProposer:
    """Drafts with another model, one token a pass, all requests of a batch in each pass.

    Its cache holds what its own passes have read: of a block, all but the last draft. What it
    lacks of the committed tokens is read at the beginning of the next block.

    Args:
        model: the smaller model, loaded as a target is.
        vocabulary: ids from here on get no mass.
        num_tokens: how many tokens it drafts at most.
        sampler: temperature and filters of the drafts; None: those of each request.

    Raises:
        ValueError: fewer than one token, a model with fewer ids than the vocabulary, or one with a
            recurrent state.
    """

    taps: tuple[int, ...] = ()
    walked = 0.0

    def __init__(
        self,
        model: Target,
        vocabulary: int | None = None,
        num_tokens: int = 5,
        sampler: SamplingSettings | None = None,
    ) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}, expected at least 1")
        if vocabulary is not None and model.vocab_size < vocabulary:
            raise ValueError(
                f"{model.name} has {model.vocab_size} token ids and the target {vocabulary}: the "
                "drafting model needs the target's vocabulary"
            )
        if model.recurrent:
            raise ValueError(
                f"{model.name} keeps a recurrent state, which cannot be taken back over "
                "the several passes of a block: draft with a model of attention layers"
            )
        self.model, self.vocabulary = model, vocabulary
        self.num_tokens, self.sampler = num_tokens, sampler
        self.open(1)

    def open(self, rows: int) -> None:
        self.cache = KVCache(self.model.num_layers, rows)
        self._valid = [0] * rows

    def start(self, row: int) -> None:
        self._valid[row] = 0
        self.cache.activate(row, row + 1)
        self.cache.truncate([0])

    def move(self, source: int, destination: int) -> None:
        self.cache.move_row(source, destination)
        self._valid[destination] = self._valid[source]

    def observe(
        self, first: int, requests: Sequence[Request], features: torch.Tensor | None, counts: list
    ) -> None:
        rows = range(first, first + len(requests))
        for row, count in zip(rows, counts, strict=True):
            self._valid[row] += count
        self.cache.activate(first, rows.stop)
        held = self.cache.active_lengths
        # drafts that fell are cut off
        self.cache.truncate([min(n, self._valid[row]) for n, row in zip(held, rows, strict=True)])
        if not max(held):  # prompts: later they would pad the passes of all others
            prompts = zip(requests, rows, strict=True)
            self._pass([request.tokens[: self._valid[row]] for request, row in prompts])

    def audit(self, row: int, tokens: Sequence[int], features: torch.Tensor | None) -> float:
        held = self.cache.lengths[row]
        if held > len(tokens):
            raise ValueError(f"row {row} of the smaller model holds {held} of {len(tokens)} tokens")
        fresh, _ = read(self.model, list(tokens[:held]))
        return self.cache.difference(row, fresh)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        room = self.model.max_positions
        limits = [
            max(min(limit, self.num_tokens, room - len(request.tokens)), 0)
            for limit, request in zip(limits, requests, strict=True)
        ]
        if not max(limits):
            return [Proposal()] * len(requests)
        self.cache.activate(0, len(requests))
        held = self.cache.active_lengths
        last = self._pass([r.tokens[n:] for r, n in zip(requests, held, strict=True)])
        drawing = Drawing(requests, self.sampler)
        for left in reversed(range(max(limits))):
            logits = self.model.head.logits(last).float()[:, : self.vocabulary]
            tokens = drawing.next(logits)
            if left:
                last = self._pass([[token] for token in tokens.tolist()])
        return drawing.proposals(limits)

    def _pass(self, read: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read tokens into the active rows; last hidden states `[n, D]` behind each list."""
        counts, starts = [len(tokens) for tokens in read], self.cache.active_lengths
        hidden = read_ragged(self.model, self.cache, read).last_hidden
        self.cache.truncate([start + count for start, count in zip(starts, counts, strict=True)])
        return hidden[torch.arange(len(read)), torch.tensor(counts) - 1]
