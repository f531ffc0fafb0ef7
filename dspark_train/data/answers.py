"""Who answers prompts: the target here, the target with a drafter, or a server."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.batch import Sampled, generate_batch
from dspark_train.decoding.request import FinishReason
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target

# as generated; from text that gives the same ids back; from text that does not
Origin = Literal["generated", "text", "differs"]


class Answer(NamedTuple):
    """New token ids (an EOS included), why they end, and where the ids come from."""

    tokens: list[int]
    finish_reason: FinishReason
    origin: Origin = "generated"


Progress = Callable[[int], None]


class Answers(Protocol):
    """Answers prompts of token ids, in their order; each has a seed of its own."""

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], progress: Progress
    ) -> list[Answer]:
        """`progress` is called with the number of new tokens as each answer is finished."""


class TargetAnswers:
    """The target itself, many rows at a time."""

    def __init__(
        self, target: Target, settings: SamplingSettings, *, slots: int, max_new_tokens: int
    ) -> None:
        self.target, self.settings = target, settings
        self.slots, self.max_new_tokens = slots, max_new_tokens

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], progress: Progress
    ) -> list[Answer]:
        def finished(_: int, sampled: Sampled) -> None:
            progress(len(sampled.tokens))

        sampled = generate_batch(
            self.target,
            prompts,
            self.settings,
            slots=self.slots,
            max_new_tokens=self.max_new_tokens,
            eos_ids=self.target.eos_ids,
            seeds=seeds,
            progress=finished,
        )
        return [Answer(one.tokens, one.finish_reason) for one in sampled]


class DrafterAnswers:
    """The target with a drafter, one request at a time: the same distribution, faster."""

    def __init__(
        self, decoder: SpeculativeDecoder, settings: SamplingSettings, *, max_new_tokens: int
    ) -> None:
        self.decoder, self.settings, self.max_new_tokens = decoder, settings, max_new_tokens

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], progress: Progress
    ) -> list[Answer]:
        s, answers = self.settings, []
        for prompt, seed in zip(prompts, seeds, strict=True):
            result = self.decoder.generate(
                prompt,
                self.max_new_tokens,
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
                seed=seed,
            )
            progress(len(result.tokens))
            answers.append(Answer(result.tokens, result.finish_reason))
        return answers
