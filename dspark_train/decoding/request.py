"""One request: its tokens, its settings, and when it ends."""

from collections.abc import Sequence
from typing import Literal

import torch

from dspark_train.decoding.logprobs import TokenLogprobs
from dspark_train.decoding.processors import build_processors, process
from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.text import TextStream

FinishReason = Literal["stop", "length"]


class RequestError(ValueError):
    """One request of a batch cannot go on; the others can, once it is removed.

    Attributes:
        request: the one.
    """

    def __init__(self, request: "Request", message: str) -> None:
        super().__init__(message)
        self.request = request


class Request:
    """Tokens committed so far and the conditions that end them.

    Args:
        prompt: token ids, at least one.
        settings: how to sample.
        max_new_tokens: ends with reason "length" after so many new tokens.
        eos_ids: ends with reason "stop" after one of these, which is kept; may be empty.
        text: follows the text where it is needed (stop strings, streaming).
        logprobs: alternatives that are reported with every new token; None reports nothing.

    Attributes:
        tokens: prompt and output.
        token_logprobs: of every new token, if asked for.
        finish_reason: None while it runs.
        traced: rounds tell the overlap of draft and target, which costs a pass over both.
    """

    def __init__(
        self,
        prompt: list[int],
        settings: SamplingSettings,
        max_new_tokens: int,
        eos_ids: tuple[int, ...] = (),
        text: TextStream | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.settings, self.max_new_tokens = settings, max_new_tokens
        self.eos_ids = frozenset(eos_ids)
        self.text, self.logprobs = text, logprobs
        self.token_logprobs: list[TokenLogprobs] = []
        self.processors = build_processors(settings, len(prompt), eos_ids)
        self.randomness = Randomness(settings.seed)
        self.finish_reason: FinishReason | None = None
        self.traced = False

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """New tokens that may still be committed."""
        return self.prompt_length + self.max_new_tokens - len(self.tokens)

    def process(self, logits: torch.Tensor, drafts: Sequence[int], first: int = 0) -> torch.Tensor:
        """Logits `[n, V]` after this request's processors; see `processors.process`.

        Raises:
            RequestError: a processor failed.
        """
        try:
            return process(logits, self.processors, self.tokens, drafts, first)
        except Exception as error:  # a user's own code runs in there
            raise RequestError(self, f"a logits processor failed: {error!r}") from error

    def proposing(self, slot: int, branch: int = 0) -> float:
        """The number in [0, 1) that the `slot`-th token after the anchor is drafted with."""
        length = len(self.tokens)
        return self.randomness.proposing(length + slot, length - 1, branch)

    def commit(self, tokens: list[int], logprobs: list[TokenLogprobs] | None = None) -> int:
        """Add tokens up to the one that ends the request; returns how many were kept."""
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if logprobs is not None:
                self.token_logprobs.append(logprobs[kept - 1])
            ended = token in self.eos_ids
            if self.text is not None and not ended:
                ended = self.text.push(token)
            if ended or self.remaining == 0:
                self.finish_reason = "stop" if ended else "length"
                return kept
        return len(tokens)
