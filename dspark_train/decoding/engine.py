"""Rounds of one request: propose, one target pass over anchor and drafts, verdict, commit."""

from collections.abc import Sequence
from time import perf_counter

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.proposers import Proposal, Proposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import draw, most_likely, warp
from dspark_train.decoding.stats import Round
from dspark_train.decoding.verify import verify, verify_greedy
from dspark_train.target import Target, TargetOutput


class Engine:
    """Decodes one request at a time with one proposer.

    The last committed token, the anchor, is not in the target's cache until the next pass has read
    it. After each pass the cache is cut to the positions whose tokens stand.

    Args:
        target: the frozen model.
        proposer: what guesses ahead.
        vocabulary: ids from here on get no mass (padding of the LM head); None: all rows count.
    """

    def __init__(self, target: Target, proposer: Proposer, vocabulary: int | None = None) -> None:
        self.target, self.proposer, self.vocabulary = target, proposer, vocabulary
        self.cache = KVCache(target.num_layers)
        # transformers looks for the device among the parameters at every call
        self.device, self.dtype = target.device, target.dtype

    @torch.inference_mode()
    def start(self, request: Request) -> float:
        """Read the prompt and commit the first token; returns the seconds it took."""
        began = perf_counter()
        self.cache.truncate([0])
        self.cache.reserve(request.prompt_length + request.max_new_tokens)
        self.proposer.start(request.tokens)
        output = self._pass(request.tokens, 0)
        self.proposer.observe(output.features, request.tokens)
        logits = self._logits(output.last_hidden[0, -1:])
        _, token = self._decide(request, logits, Proposal())
        request.commit([token])
        return perf_counter() - began

    @torch.inference_mode()
    def step(self, request: Request) -> Round:
        """One round of a request that was started and has not finished."""
        began = perf_counter()
        tokens, proposer = request.tokens, self.proposer
        anchor = len(tokens) - 1
        # the token after the last draft is committed too
        limit = request.remaining - 1
        proposal = Proposal()
        if limit > 0:
            proposal = proposer.propose(tokens, request.settings, request.randomness, limit)
        drafted = perf_counter()
        output = self._pass([tokens[anchor], *proposal.tokens], anchor)
        logits = self._logits(output.last_hidden[0])
        verified = perf_counter()
        accepted, token = self._decide(request, logits, proposal)
        kept = request.commit([*proposal.tokens[:accepted], token])
        stands = min(accepted, kept)
        self.cache.truncate([anchor + 1 + stands])
        decided = perf_counter()
        features = None if output.features is None else output.features[:, : stands + 1]
        proposer.observe(features, tokens[anchor : anchor + 1 + stands])
        observed = perf_counter()
        confidence = None if proposal.confidence is None else proposal.confidence.tolist()
        draft = (drafted - began) + (observed - decided)
        return Round(
            proposed=len(proposal.tokens),
            accepted=stands,
            judged=stands if kept <= accepted else min(accepted + 1, len(proposal.tokens)),
            committed=kept,
            confidence=confidence,
            draft=draft,
            verify=verified - drafted,
            other=perf_counter() - began - draft - (verified - drafted),
        )

    def _pass(self, tokens: Sequence[int], start: int) -> TargetOutput:
        """Let the target read `tokens` at positions from `start` on."""
        count, device = len(tokens), self.device
        return self.target.forward(
            torch.tensor([tokens], device=device),
            position_ids=torch.arange(start, start + count, device=device)[None],
            attention_mask=self.cache.mask(count, self.dtype, device),
            cache=self.cache,
            taps=self.proposer.taps,
        )

    def _logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` of the usable vocabulary at hidden states `[n, D]`."""
        return self.target.head.logits(last_hidden)[:, : self.vocabulary]

    def _decide(
        self, request: Request, logits: torch.Tensor, proposal: Proposal
    ) -> tuple[int, int]:
        """How many drafts stand, and the token after them."""
        settings, randomness = request.settings, request.randomness
        if settings.greedy:
            return verify_greedy(most_likely(logits).tolist(), proposal.tokens)
        first = len(request.tokens)
        uniforms = [randomness.uniform(first + i, "accept") for i in range(len(proposal.tokens))]
        verdict = verify(warp(logits, settings), proposal.tokens, proposal.probs, uniforms)
        u = randomness.uniform(first + verdict.accepted, "resample")
        return verdict.accepted, draw(verdict.next_probs, u)
