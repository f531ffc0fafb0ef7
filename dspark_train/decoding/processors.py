"""What changes logits before tokens are filtered: penalties, bans, biases, a user's own.

Everything here is a processor as transformers has them: `processor(input_ids [n, length], scores
[n, V]) -> scores`. It must be a function of its two arguments alone, since drafts that are rejected
later pass through it: a count that it keeps itself would be wrong then.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dspark_train.decoding.sampling import SamplingSettings

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PREFIX_FREE = (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# they keep state between calls, or need more than one model
_REFUSED = (
    "ClassifierFreeGuidance",
    "SynthIDText",
    "AlternatingCodebooks",
    "Dia",
    "Bark",
    "Whisper",
    "Encoder",
)


class TokenBias:
    """Adds a number to the logits of single tokens, minus infinity to ban them.

    Args:
        bias: by token id; may be empty.
        allowed: if given, all other tokens are banned.
    """

    prefix_free = True

    def __init__(self, bias: Mapping[int, float], allowed: Sequence[int] | None = None) -> None:
        self.bias, self.allowed = dict(bias), allowed
        self._row = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._row.shape[0] != scores.shape[1] or self._row.device != scores.device:
            start = 0.0 if self.allowed is None else float("-inf")
            row = torch.full((scores.shape[1],), start)
            if self.allowed is not None:
                row[list(self.allowed)] = 0.0
            row[list(self.bias)] += torch.tensor(list(self.bias.values()))
            self._row = row.to(scores.device)
        return scores + self._row


class OccurrencePenalty:
    """Lowers the logits of tokens in the output so far (the prompt does not count).

    Args:
        presence: subtracted once from every token that occurred.
        frequency: subtracted as often as it occurred.
        prompt_length: tokens that do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, ids, torch.ones_like(ids, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


def build_processors(
    settings: SamplingSettings, prompt_length: int, eos_ids: Sequence[int]
) -> list[Processor]:
    """The processors of one request, in transformers' order; its own ones come last."""
    s, found = settings, []
    if s.logit_bias or s.allowed_tokens is not None:
        found.append(TokenBias(dict(s.logit_bias), s.allowed_tokens))
    if s.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(s.repetition_penalty)))
    if s.presence_penalty or s.frequency_penalty:
        found.append(OccurrencePenalty(s.presence_penalty, s.frequency_penalty, prompt_length))
    if s.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in s.bad_words]))
    if s.min_tokens and eos_ids:
        found.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, s.min_tokens, sorted(eos_ids))
        )
    if s.suppress_at_begin:
        found.append(SuppressTokensAtBeginLogitsProcessor(list(s.suppress_at_begin), prompt_length))
    for processor in s.processors:
        name = type(processor).__name__
        if name.startswith(_REFUSED):
            raise ValueError(
                f"processor {name} is not supported: it keeps state between calls or needs a "
                "second pass of the model, and drafts that are rejected would confuse it; leave it "
                "out"
            )
        found.append(processor)
    return found


def process(
    logits: torch.Tensor,
    processors: Sequence[Processor],
    tokens: Sequence[int],
    drafts: Sequence[int],
    first: int = 0,
) -> torch.Tensor:
    """Logits float32 `[n, V]` after all processors.

    Row i is for the token after `tokens` and the first `first + i` of `drafts`. Processors that do
    not look at the tokens before (known ones, and those with an attribute `prefix_free = True`) run
    once for all rows, the others row by row, each row with the drafts before it.
    """
    rows = logits.to(torch.float32, copy=True)
    ids = torch.tensor([[*tokens, *drafts]], device=logits.device)
    length = len(tokens) + first
    for processor in processors:
        if isinstance(processor, _PREFIX_FREE) or getattr(processor, "prefix_free", False):
            rows = processor(ids.expand(len(rows), -1), rows)
        else:
            given = [(ids[:, : length + i], rows[i : i + 1]) for i in range(len(rows))]
            rows = torch.cat([processor(*pair) for pair in given])
    return rows
