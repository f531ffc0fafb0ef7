"""What is answered, in OpenAI's words."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from dspark_train.decoding.logprobs import TokenLogprobs
from dspark_train.decoding.request import Request


class Answer:
    """The frame of all answers to one request of a client.

    Args:
        chat: of the chat endpoint, else of completions.
        model: its name.
        tokenizer: of the target.
        requests: the choices.
        prompts: how many prompts they belong to, in groups of equal size.
    """

    def __init__(
        self, chat: bool, model: str, tokenizer: Any, requests: Sequence[Request], prompts: int
    ) -> None:
        self.chat, self.tokenizer, self.requests, self.prompts = chat, tokenizer, requests, prompts
        self.frame = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.offsets = [0] * len(requests)

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all choices (fault 16)."""
        each = len(self.requests) // self.prompts
        prompt = sum(request.prompt_length for request in self.requests[::each])
        new = sum(len(request.new_tokens) for request in self.requests)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self, texts: Sequence[str], ends: Sequence[str]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, (request, text, end) in enumerate(zip(self.requests, texts, ends, strict=True)):
            content: dict[str, Any] = {"text": text}
            if self.chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs = self._logprobs(index, 0, len(request.new_tokens))
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": end})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.frame, "object": kind, "choices": choices, "usage": self.usage()}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice of a chat: who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, start: int, stop: int, end: str | None) -> dict:
        """A chunk: text and tokens `start` to `stop` of a choice, and its end."""
        logprobs = self._logprobs(index, start, stop) if stop > start else None
        content = {"content": text} if text or end is None else {}
        return self._chunk(index, content if self.chat else text, logprobs, end)

    def last(self) -> dict[str, Any]:
        """The chunk that tells the usage."""
        return {**self._frame_of_chunk, "choices": [], "usage": self.usage()}

    @property
    def _frame_of_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.frame, "object": kind}

    def _chunk(self, index: int, content: Any, logprobs: Any, end: str | None) -> dict[str, Any]:
        said = {"delta" if self.chat else "text": content}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": end}
        return {**self._frame_of_chunk, "choices": [choice]}

    def _logprobs(self, index: int, start: int, stop: int) -> dict[str, Any] | None:
        request = self.requests[index]
        if request.logprobs is None:
            return None
        given = request.token_logprobs[start:stop]
        if self.chat:
            return {"content": [self._entry(one) for one in given], "refusal": None}
        tokens = [self._text(one.token) for one in given]
        offsets = []
        for token in tokens:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in given],
            "top_logprobs": [
                {self._text(token): _finite(value) for token, value in one.top} for one in given
            ],
            "text_offset": offsets,
        }

    def _entry(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._named(token, value) for token, value in one.top]
        return {**self._named(one.token, one.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])


def _finite(logprob: float) -> float:
    # JSON has no infinity; the original writes this number
    return max(logprob, -9999.0)


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
