"""Log-probabilities of emitted tokens under the target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one new token.

    Attributes:
        token: its id.
        logprob: under the target's own softmax, before all processors and filters.
        sampled_logprob: under the distribution that the sampler allows it from: after processors,
            temperature and filters; 0 where decoding is greedy.
        top: the most likely (id, logprob) of the target's own softmax, descending.
    """

    token: int
    logprob: float
    sampled_logprob: float
    top: list[tuple[int, float]]


def token_logprobs(
    logits: torch.Tensor, probs: torch.Tensor | None, tokens: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens`, the i-th from row i.

    Args:
        logits: `[n, V]` as the target gave them, n tokens or more.
        probs: `[n, V]` that the tokens were drawn from; None: greedy.
        top: alternatives per token.
    """
    places = torch.tensor(tokens, device=logits.device)[:, None]
    own = logits[: len(tokens)].float().log_softmax(-1)
    chosen = own.gather(1, places)[:, 0].tolist()
    sampled = [0.0] * len(tokens)
    if probs is not None:
        sampled = probs[: len(tokens)].gather(1, places)[:, 0].log().tolist()
    best = own.topk(min(top, own.shape[1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    alternatives = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return [
        TokenLogprobs(*parts) for parts in zip(tokens, chosen, sampled, alternatives, strict=True)
    ]
