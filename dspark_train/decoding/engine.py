"""Rounds of a batch: propose, schedule, verify, commit.

    engine = Engine(target, proposer, rows=16)
    engine.add([request, other])        # reads the prompts, commits their first tokens
    while engine.requests:
        rounds = engine.step()          # one round of every request
        for request in engine.take_finished():
            ...

Requests join and leave between rounds in any order. Each has its own sampler, seed, stops, length
and proposal length (0 included); they share one drafter pass and one target pass a round. What one
gives does not depend on what shares the batch.
"""

from collections.abc import Sequence
from time import perf_counter

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.fixed_pass import FixedPasses
from dspark_train.decoding.proposers import Proposal, Proposer, Tree, TreeProposer
from dspark_train.decoding.ragged import read_ragged
from dspark_train.decoding.recording import tier_of
from dspark_train.decoding.request import Request, RequestError
from dspark_train.decoding.scheduler import Fixed, Scheduler
from dspark_train.decoding.stats import Round, Seconds
from dspark_train.decoding.tree_pass import read_trees, refuse_without_trees, straighten
from dspark_train.decoding.tree_verify import TreeDecision, decide_trees
from dspark_train.decoding.verdicts import decide, round_of
from dspark_train.target import Target, TargetOutput


class Engine:
    """Decodes requests in the rows of one cache, with one proposer.

    The last committed token of a request, its anchor, is not in the target's cache until the next
    pass has read it. After each pass every row is cut to the positions whose tokens stand.

    Args:
        target: the frozen model.
        proposer: what guesses ahead.
        vocabulary: ids from here on get no mass (padding of the LM head); None: all rows count.
        rows: requests it decodes at the same time, at most.
        scheduler: chooses the verify length of every request in every round; None: whole proposals.
        reads_ahead: have one more row, in which a prompt is read in pieces while others go on.

    Attributes:
        pads: all requests of a round cost what the widest does.
        reading: the request that is being read in pieces, None if there is none.
        requests: `requests[i]` owns row i of every cache. Read it, and change it by `add`,
            `remove` and `take_finished`.
        decide: the verdict of a round; a certificate plants faults here.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        vocabulary: int | None = None,
        *,
        rows: int = 1,
        scheduler: Scheduler | None = None,
        reads_ahead: bool = False,
    ) -> None:
        self.target, self.proposer, self.vocabulary = target, proposer, vocabulary
        self.rows, self.scheduler = rows, scheduler or Fixed()
        self.requests: list[Request] = []
        self.decide = decide
        if isinstance(proposer, TreeProposer):
            refuse_without_trees(target)
            self.decide = decide_trees
        self.reading: Request | None = None
        self.cache = KVCache.of(target, rows + reads_ahead)
        self.fixed = FixedPasses(target, self.cache, rows, proposer.taps) if target.graphs else None
        self.pads = target.graphs or not target.packs_rows
        proposer.open(rows + reads_ahead)

    @property
    def free(self) -> int:
        """Rows that `add` can fill."""
        return self.rows - len(self.requests)

    @torch.inference_mode()
    def add(self, requests: Sequence[Request]) -> float:
        """Read the tokens of new requests in one pass, and commit the first new token of each.

        Requests of like length waste least. One that was removed in the middle of its output may
        be added again: it goes on where it was.

        Returns:
            Seconds it took.

        Raises:
            ValueError: more requests than free rows, or a finished one.
            RequestError: as `step`; the new requests are in the batch only if all succeed.
        """
        began, first = perf_counter(), len(self.requests)
        if len(requests) > self.free or any(r.finish_reason is not None for r in requests):
            raise ValueError(
                f"{len(requests)} requests for {self.free} free rows, with finish reasons "
                f"{[r.finish_reason for r in requests]}: expected no more than fit, unfinished"
            )
        self.requests += requests
        for row in range(first, len(self.requests)):
            self.cache.activate(row, row + 1)
            self.cache.truncate([0])
            self.proposer.start(row)
        self.cache.activate(first, len(self.requests))
        longest = max(r.prompt_length + r.max_new_tokens for r in requests)
        self.cache.reserve(longest if self.fixed is None else tier_of(self.cache, longest))
        fresh = [len(r.tokens) == r.prompt_length for r in requests]
        read = [r.tokens if new else r.tokens[:-1] for r, new in zip(requests, fresh, strict=True)]
        hidden = self._read(first, requests, read)
        begin = [i for i, new in enumerate(fresh) if new]
        if begin:
            last = hidden[begin, [len(read[i]) - 1 for i in begin]]
            try:
                decided = self.decide(
                    [requests[i] for i in begin], self._logits(last), [Proposal()] * len(begin)
                )
            except RequestError:
                del self.requests[first:]
                raise
            for i, decision in zip(begin, decided, strict=True):
                requests[i].commit(decision.tokens, decision.logprobs)
        return perf_counter() - began

    def begin(self, request: Request) -> None:
        """Start to read a request in pieces, in the row for that; see `read`.

        Raises:
            ValueError: another one is being read, no row is free for it, or it has finished.
        """
        if self.reading is not None or not self.free or request.finish_reason is not None:
            raise ValueError(
                f"{self.free} free rows, reading={self.reading is not None}, finish reason "
                f"{request.finish_reason}: expected a free row, nothing being read, unfinished"
            )
        self.reading = request
        self.cache.activate(self.rows, self.rows + 1)
        self.cache.truncate([0])
        self.proposer.start(self.rows)

    @torch.inference_mode()
    def read(self, count: int) -> bool:
        """Read `count` more tokens of `reading`; after the last it joins the batch.

        Returns:
            Whether it has joined, with its first new token as `add` would have committed it.

        Raises:
            RequestError: as `step`; the request is not in the batch then.
        """
        request, row = self.reading, self.rows
        fresh = len(request.tokens) == request.prompt_length
        tokens = request.tokens if fresh else request.tokens[:-1]
        self.cache.activate(row, row + 1)
        held = self.cache.lengths[row]
        self.cache.reserve(request.prompt_length + request.max_new_tokens)
        hidden = self._read(row, [request], [tokens[held : held + count]])
        if held + count < len(tokens):
            return False
        self.reading = None
        if fresh:
            (decision,) = self.decide([request], self._logits(hidden[0, -1:]), [Proposal()])
            request.commit(decision.tokens, decision.logprobs)
        self.requests.append(request)
        self.cache.move_row(row, len(self.requests) - 1)
        self.proposer.move(row, len(self.requests) - 1)
        return True

    @torch.inference_mode()
    def remove(self, request: Request) -> None:
        """Free the row of a request, finished or not; its tokens stay with it.

        Raises:
            ValueError: a request that is not in the batch.
        """
        row = next((i for i, one in enumerate(self.requests) if one is request), None)
        if row is None:
            raise ValueError("the request is not in the batch: it was never added, or removed")
        last = self.requests.pop()
        if last is not request:  # the last row fills the gap
            self.requests[row] = last
            self.cache.move_row(len(self.requests), row)
            self.proposer.move(len(self.requests), row)

    def take_finished(self) -> list[Request]:
        """Remove the requests that have ended, and return them."""
        finished = [request for request in self.requests if request.finish_reason is not None]
        for request in reversed(finished):  # so that the row which fills a gap goes on
            self.remove(request)
        return finished

    @torch.inference_mode()
    def step(self) -> list[Round]:
        """One round of every request in the batch, none of which may have finished.

        Returns:
            What happened to each, in the order of `requests`. Seconds are a request's equal share.

        Raises:
            RequestError: bans or processors of one request failed. Nothing has changed then: the
                round can be run again once that request is removed.
        """
        requests, began, walked = self.requests, perf_counter(), self.proposer.walked
        proposals = self.propose()
        drafted = perf_counter()
        lengths = self.scheduler.schedule(requests, proposals)
        proposals = [p.cut(length) for p, length in zip(proposals, lengths, strict=True)]
        scheduled = perf_counter()
        logits, output = self.verify(proposals)
        verified = perf_counter()
        try:
            decided = self.decide(requests, logits, proposals)
        except RequestError:
            self.cache.truncate([len(request.tokens) - 1 for request in requests])
            raise
        sampled = perf_counter()
        kept = [
            request.commit(decision.tokens, decision.logprobs)
            for request, decision in zip(requests, decided, strict=True)
        ]
        stands = [min(d.accepted, count) for d, count in zip(decided, kept, strict=True)]
        committed = perf_counter()
        if isinstance(decided[0], TreeDecision):
            output = straighten(self.cache, output, [decision.path for decision in decided])
        self._observe(0, requests, output, [count + 1 for count in stands])
        observed = perf_counter()
        walk, rest = self.proposer.walked - walked, scheduled - drafted + committed - sampled
        draft = drafted - began - walk + observed - committed
        parts = (draft, walk, verified - scheduled, sampled - verified, rest)
        shares = Seconds(*(seconds / len(requests) for seconds in parts))
        rounds = [
            round_of(proposal, decision, count, shares)
            for proposal, decision, count in zip(proposals, decided, kept, strict=True)
        ]
        self.scheduler.observe(requests, rounds)
        return rounds

    def propose(self) -> list[Proposal]:
        """Drafts for every request, as many as scheduler and remaining length allow."""
        # the token after the last draft is committed too
        given = zip(self.scheduler.limits(self.requests), self.requests, strict=True)
        limits = [min(limit, request.remaining - 1) for limit, request in given]
        if max(limits) < 1:
            return [Proposal()] * len(limits)
        return self.proposer.propose(self.requests, limits)

    def verify(self, proposals: Sequence[Proposal]) -> tuple[torch.Tensor, TargetOutput]:
        """One target pass over anchors and drafts.

        Returns:
            Logits `[N, V]`, the rows of a request one after the other: for its first draft, …, for
            the token after its last one. And the output `[n, q, …]` of the pass.
        """
        self.cache.activate(0, len(self.requests))
        read = [
            [request.tokens[-1], *proposal.tokens]
            for request, proposal in zip(self.requests, proposals, strict=True)
        ]
        logits = None
        if isinstance(proposals[0], Tree):
            output = read_trees(self.target, self.cache, read, proposals, self.proposer.taps)
        elif self.fixed is not None:
            output, logits = self.fixed.read(read)
        else:
            output = read_ragged(self.target, self.cache, read, self.proposer.taps)
        width = output.last_hidden.shape[1]
        places = [i * width + k for i, tokens in enumerate(read) for k in range(len(tokens))]
        flat = (output.last_hidden if logits is None else logits).flatten(0, 1)
        flat = flat if len(places) == len(flat) else flat[places]
        return self._logits(flat) if logits is None else flat[:, : self.vocabulary], output

    def _read(
        self, first: int, requests: Sequence[Request], read: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Let target and proposer read on in the active rows; last hidden states `[n, q, D]`."""
        output = read_ragged(self.target, self.cache, read, self.proposer.taps)
        self._observe(first, requests, output, [len(tokens) for tokens in read])
        return output.last_hidden

    def _observe(
        self, first: int, requests: Sequence[Request], output: TargetOutput, counts: Sequence[int]
    ) -> None:
        """Keep the first `counts` positions of what the active rows have just read."""
        width = output.last_hidden.shape[1]
        self.cache.truncate(
            [
                length - width + count
                for length, count in zip(self.cache.active_lengths, counts, strict=True)
            ]
        )
        self.proposer.observe(first, requests, output.features, counts)

    def _logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V]` of the usable vocabulary at hidden states `[N, D]`."""
        return self.target.head.logits(last_hidden)[:, : self.vocabulary]
