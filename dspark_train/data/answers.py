"""Who answers prompts: the target here, the target with a drafter, or a server."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from dspark_train.decoding.batch import Sampled, generate_batch
from dspark_train.decoding.proposers import Proposer
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
    """The target itself, many rows at a time; with a proposer faster, in the same distribution."""

    def __init__(
        self,
        target: Target,
        settings: SamplingSettings,
        *,
        slots: int,
        max_new_tokens: int,
        proposer: Proposer | None = None,
    ) -> None:
        self.target, self.settings, self.proposer = target, settings, proposer
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
            proposer=self.proposer,
            progress=finished,
        )
        return [Answer(one.tokens, one.finish_reason) for one in sampled]
