"""The decoder that users call."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dspark_train.decoding.admission import Prompt, admit
from dspark_train.decoding.batch import decode_all
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.loading import (
    ProposerName,
    block_proposer,
    check_proposer,
    load_proposer,
    load_target,
)
from dspark_train.decoding.proposers import Proposer, TreeShape
from dspark_train.decoding.request import Request
from dspark_train.decoding.result import Result, Stream, result
from dspark_train.decoding.sampling import SamplingSettings, usable_vocabulary
from dspark_train.decoding.stats import DecodingStats, Round
from dspark_train.drafter import Drafter
from dspark_train.formats import load_config
from dspark_train.target import Target


class SpeculativeDecoder:
    """Generates with a target, sped up by a proposer, without changing the target's output.

    Args:
        target: the frozen model.
        proposer: what guesses ahead, over the target's usable vocabulary; for this decoder alone.
    """

    def __init__(self, target: Target, proposer: Proposer) -> None:
        self.target, self.proposer = target, proposer
        self.vocabulary = usable_vocabulary(target.tokenizer, target.vocab_size)
        self.engine = Engine(target, proposer, self.vocabulary)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path | None = None,
        target: Target | str | None = None,
        *,
        proposer: ProposerName = "drafter",
        tree: TreeShape | None = None,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> "SpeculativeDecoder":
        """Build a decoder from a drafter checkpoint.

        Args:
            checkpoint: folder or hub id of a drafter in any layout of `formats/table.py`; not
                needed for "lookup" and "plain".
            target: a loaded target, or a name for `Target.load`; None takes the one that the
                checkpoint records.
            proposer: "drafter", "drafter-no-heads" (its backbone alone), "lookup" or "plain".
            tree: draft a tree of that shape in every round, where None drafts one chain; for
                "drafter" and "drafter-no-heads".
            dtype, device: for a target that is loaded here; the drafter follows the target.

        Raises:
            ValueError: an unknown proposer or one without the checkpoint it needs, a tree where
                nothing can draft one or the target cannot read one, a checkpoint that is missing,
                damaged or not a drafter, nothing that names a target, or a target that the drafter
                was not made for.
        """
        check_proposer(proposer, checkpoint, tree)
        config = None if checkpoint is None else load_config(checkpoint)
        loaded = load_target(config, target, dtype, device)
        return cls(loaded, load_proposer(proposer, checkpoint, loaded, tree))

    @classmethod
    def with_drafter(
        cls,
        target: Target,
        drafter: Drafter,
        *,
        use_heads: bool = True,
        tree: TreeShape | None = None,
    ) -> "SpeculativeDecoder":
        """A decoder of a drafter in memory, which is moved to the target's dtype and device.

        Raises:
            ValueError: a drafter made for another target.
        """
        drafter.to(device=target.device, dtype=target.dtype)
        return cls(target, block_proposer(drafter, target, use_heads=use_heads, tree=tree))

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        *,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        logprobs: int | None = None,
        **sampling: Any,
    ) -> Request:
        """A request for `run`.

        Args:
            prompt: text (tokenised as it is), chat messages (through the target's template), or
                token ids.
            max_new_tokens: at least 1; the target's context may end the output earlier.
            stop: strings; the text ends before the first of them, the tokens with the one that
                completes it.
            eos_ids: ids that end the output; None takes the target's, () none.
            logprobs: alternatives that are reported with every new token; None reports nothing.
            sampling: fields of `SamplingSettings`: temperature, top_k, top_p, min_p, seed, …; the
                default is greedy. `from_generation_config` gives them for transformers' config.

        Raises:
            ValueError: an empty prompt, one that fills the context, an id outside the vocabulary,
                or settings unknown or out of range.
        """
        known = {one.name for one in fields(SamplingSettings)}
        if unknown := sorted(set(sampling) - known):
            raise ValueError(f"{unknown} unknown, expected sampling settings: {sorted(known)}")
        settings = SamplingSettings(**sampling)
        return admit(
            self.target, self.vocabulary, prompt, max_new_tokens, settings, stop, eos_ids, logprobs
        )

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        *,
        trace: Callable[[Round], None] | None = None,
        **options: Any,
    ) -> Result:
        """Generate the continuation of one prompt.

        Args:
            prompt, max_new_tokens, options: as those of `request`.
            trace: called with every round.

        Raises:
            ValueError: as `request`.
        """
        request = self.request(prompt, max_new_tokens, **options)
        return Stream(self._pieces(request, trace)).drain()

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        *,
        trace: Callable[[Round], None] | None = None,
        **options: Any,
    ) -> Stream:
        """As `generate`, with the text in pieces as it comes. One request at a time.

        Raises:
            ValueError: as `request`, and a target without a tokenizer.
        """
        if self.target.tokenizer is None:
            raise ValueError(f"target {self.target.name} has no tokenizer, so no text to stream")
        request = self.request(prompt, max_new_tokens, **options)
        return Stream(self._pieces(request, trace))

    def run(self, requests: Sequence[Request], rows: int = 16) -> list[Result]:
        """Generate many continuations, `rows` at a time, each with settings of its own.

        Results are in the order of `requests`; each is what `generate` gives for it alone, up to
        what batching does to floating point.

        Raises:
            ValueError: no rows, or something that is not a request which has yet to run, once.
        """
        if rows < 1:
            raise ValueError(f"rows={rows}, expected at least 1")
        seen: set[int] = set()
        for i, request in enumerate(requests):
            if not isinstance(request, Request):
                raise ValueError(
                    f"requests[{i}] is {reprlib.repr(request)}, expected what `request` gives"
                )
            again = id(request) in seen
            seen.add(id(request))
            if again or request.new_tokens:
                raise ValueError(
                    f"requests[{i}] {'is in the list already' if again else 'has run already'}: "
                    "a request runs once, make another one"
                )
        if not requests:
            return []
        rows = min(rows, len(requests))
        stats = decode_all(self._engine_of(rows), requests, rows=rows)
        if not self.target.graphs:  # what was recorded would be lost; else memory is let go
            self._engine_of(1)
        return [result(request, each) for request, each in zip(requests, stats, strict=True)]

    def _engine_of(self, rows: int) -> Engine:
        """The engine, with so many rows, with graphs maybe more, and no request in it."""
        # a stream that was not read to its end leaves one
        for left in tuple(self.engine.requests):
            self.engine.remove(left)
        enough = self.engine.rows >= rows if self.target.graphs else self.engine.rows == rows
        if not enough:
            self.engine = Engine(self.target, self.proposer, self.vocabulary, rows=rows)
        return self.engine

    def _pieces(
        self, request: Request, trace: Callable[[Round], None] | None
    ) -> Iterator[str | Result]:
        stats, engine = DecodingStats(requests=1), self._engine_of(1)
        request.traced = trace is not None
        stats.seconds["prefill"] = engine.add([request])
        stats.tokens = 1
        text = request.text
        while request.finish_reason is None:
            if text is not None:
                yield text.take()
            if engine.requests != [request]:
                raise RuntimeError("another request has begun before this stream was read")
            (round_,) = engine.step()
            stats.add(round_)
            if trace is not None:
                trace(round_)
        if text is not None:
            yield text.finish()
        yield result(request, stats)
