"""What a client may ask, in OpenAI's words. What is unknown or not supported is refused."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_train.decoding.sampling import SamplingSettings


class StreamOptions(BaseModel):
    """`include_usage`: the last chunk of a stream tells the usage; `continuous_usage_stats`: every
    chunk does (not OpenAI's, but that of other servers)."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(BaseModel):
    """What both endpoints share. `top_k`, `min_p` and `repetition_penalty` are ours."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    n: int = Field(1, ge=1, le=16)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # taken and not needed: they do not change what is answered
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _limits(self) -> "Sampling":
        if len(self.stops) > 4 or "" in self.stops:
            raise ValueError("stop: expected at most 4 strings, none empty")
        if any(not -100 <= bias <= 100 for bias in (self.logit_bias or {}).values()):
            raise ValueError("logit_bias: expected numbers from -100 to 100")
        return self

    @property
    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wanted(self) -> int | None:
        """New tokens asked for, None: as many as there may be."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report with every token; None: no log-probabilities."""
        raise NotImplementedError

    def settings(self, choice: int) -> SamplingSettings:
        """Sampling of one choice; each has a seed of its own."""
        return SamplingSettings(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + choice,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
        )


class TextPart(BaseModel):
    """A part of a message; only text is understood."""

    model_config = ConfigDict(extra="forbid")
    type: str = Field(pattern="^text$")
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wanted(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Any]:
        return [[message.plain() for message in self.messages]]


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wanted(self) -> int | None:
        return self.max_tokens or 16  # as the original

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """One or several, each text or token ids."""
        single = isinstance(self.prompt, str) or all(isinstance(t, int) for t in self.prompt)
        return [self.prompt] if single else self.prompt
