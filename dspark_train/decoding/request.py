"""One request: its tokens, its settings, and when it ends."""

from typing import Literal

from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.text import TextStream

FinishReason = Literal["stop", "length"]


class Request:
    """Tokens committed so far and the conditions that end them.

    Args:
        prompt: token ids, at least one.
        settings: how to sample.
        max_new_tokens: ends with reason "length" after so many new tokens.
        eos_ids: ends with reason "stop" after one of these, which is kept; may be empty.
        text: follows the text where it is needed (stop strings, streaming).

    Attributes:
        traced: rounds tell the overlap of draft and target, which costs a pass over both.
    """

    def __init__(
        self,
        prompt: list[int],
        settings: SamplingSettings,
        max_new_tokens: int,
        eos_ids: tuple[int, ...] = (),
        text: TextStream | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.settings, self.max_new_tokens = settings, max_new_tokens
        self.eos_ids = frozenset(eos_ids)
        self.text = text
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

    def proposing(self, slot: int) -> float:
        """The number in [0, 1) that the `slot`-th token after the anchor is drafted with."""
        length = len(self.tokens)
        return self.randomness.proposing(length + slot, length - 1)

    def commit(self, tokens: list[int]) -> int:
        """Add tokens up to the one that ends the request; returns how many were kept."""
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            ended = token in self.eos_ids
            if self.text is not None and not ended:
                ended = self.text.push(token)
            if ended or self.remaining == 0:
                self.finish_reason = "stop" if ended else "length"
                return kept
        return len(tokens)
