"""Compares every cache of an engine with a fresh reading of the tokens that it claims to hold."""

from typing import TYPE_CHECKING

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.target import Target

if TYPE_CHECKING:
    from dspark_train.decoding.engine import Engine


@torch.inference_mode()
def audit(engine: "Engine") -> float:
    """Largest difference of an entry, in units of the largest entry of its layer; 0 if none.

    Slow: it reads all requests of the batch again. Rounding alone gives about 1e-6 in float32 and
    1e-2 in bfloat16.

    Raises:
        ValueError: a row of a cache that holds another number of positions than its request says.
    """
    worst = 0.0
    for row, request in enumerate(engine.requests):
        held = engine.cache.lengths[row]
        # a request that ended with a draft has no anchor
        expected = len(request.tokens) - (request.finish_reason is None)
        if held != expected and (request.finish_reason is None or held != expected - 1):
            raise ValueError(
                f"row {row} of the target's cache holds {held} of {expected} positions"
            )
        fresh, features = read(engine.target, request.tokens[:held], engine.proposer.taps)
        own = engine.proposer.audit(row, request.tokens[:held], features)
        worst = max(worst, engine.cache.difference(row, fresh), own)
    return worst


def read(
    target: Target, tokens: list[int], taps: tuple[int, ...] = ()
) -> tuple[KVCache, torch.Tensor | None]:
    """A cache after one pass over `tokens`, and the features of that pass."""
    cache = KVCache.of(target)
    ids = torch.tensor([tokens], device=target.device)
    masks = cache.masks(len(tokens), target)
    return cache, target.forward(ids, attention_mask=masks, cache=cache, taps=taps).features
