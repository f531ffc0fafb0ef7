"""What a request gives: a result, or a stream of text that ends in one."""

from collections.abc import Iterator
from dataclasses import dataclass

from dspark_train.decoding.logprobs import TokenLogprobs
from dspark_train.decoding.request import FinishReason, Request
from dspark_train.decoding.stats import DecodingStats


@dataclass(frozen=True)
class Result:
    """The output of one request.

    Attributes:
        tokens: new token ids, with the EOS if one ended them.
        text: their text without special tokens, cut before a stop string; "" without a tokenizer.
        finish_reason: "stop" (EOS or stop string) or "length".
        stats: of this request.
        prompt_tokens: length of the prompt in tokens.
        logprobs: of every token in `tokens`, None where they were not asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    stats: DecodingStats
    prompt_tokens: int
    logprobs: list[TokenLogprobs] | None = None


def result(request: Request, stats: DecodingStats) -> Result:
    """The result of a request that has ended."""
    text = request.text
    if text is not None:
        text.finish()
    return Result(
        tokens=request.new_tokens,
        text="" if text is None else text.text,
        finish_reason=request.finish_reason,
        stats=stats,
        prompt_tokens=request.prompt_length,
        logprobs=None if request.logprobs is None else request.token_logprobs,
    )


class Stream:
    """Iterate for pieces of text; `result` is there once they are exhausted.

    The pieces concatenate to `result.text`. Leaving early leaves `result` None.
    """

    def __init__(self, pieces: Iterator[str | Result]) -> None:
        self._pieces = pieces
        self.result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, Result):
                self.result = piece
            elif piece:
                yield piece

    def drain(self) -> Result:
        """Run to the end and return the result."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result
