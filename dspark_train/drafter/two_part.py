"""Exact block attention in two parts: scores against context and own block, one softmax.

The square of all slots against all slots and context is never built, so compute grows linearly with
the number of blocks.
"""

from typing import NamedTuple

import torch

KeysValues = tuple[torch.Tensor, torch.Tensor]


class PartMask(NamedTuple):
    """What slots see.

    Attributes:
        context: `[B, A, K or 1, S]` bool, true where the context is visible; None: everywhere.
        causal: whether slots see their own block up to themselves, instead of all of it.
    """

    context: torch.Tensor | None = None
    causal: bool = False


def two_part_attend(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, mask: PartMask, scale: float
) -> torch.Tensor:
    """Attend from every slot to the context and to its own block.

    Args:
        queries: `[B, A, K, H, d]`.
        context: keys and values `[B, Hkv, S, d]`.
        own: keys and values `[B, A, Hkv, K, d]` of the blocks.
        mask: what is visible.
        scale: factor on the scores.

    Returns:
        `[B, A, K, H, d]`.
    """
    B, A, K, heads, d = queries.shape
    keys, values = own
    H, S = keys.shape[2], context[0].shape[2]
    G = heads // H
    # [B, A, H, G·K, d]: the query heads of one KV head side by side
    queries = queries.view(B, A, K, H, G, d).permute(0, 1, 3, 4, 2, 5).reshape(B, A, H, G * K, d)

    over_context = queries.transpose(1, 2).reshape(B, H, A * G * K, d)
    context_scores = (over_context @ context[0].to(queries.dtype).transpose(-1, -2)).view(
        B, H, A, G * K, S
    )
    block_scores = (queries @ keys.transpose(-1, -2)).transpose(1, 2)
    scores = torch.cat((context_scores, block_scores), dim=-1).float() * scale
    if mask.context is not None:
        seen = mask.context if mask.context.shape[2] == 1 else mask.context.repeat(1, 1, G, 1)
        hidden = ~seen
        scores[..., :S] = scores[..., :S].masked_fill(hidden[:, None], float("-inf"))
    if mask.causal:
        later = torch.ones(K, K, dtype=torch.bool, device=scores.device).triu(1).repeat(G, 1)
        scores[..., S:] = scores[..., S:].masked_fill(later, float("-inf"))
    weights = scores.softmax(-1).to(values.dtype)

    from_context = weights[..., :S].reshape(B, H, A * G * K, S) @ context[1].to(values.dtype)
    from_block = weights[..., S:].transpose(1, 2) @ values
    mixed = from_context.view(B, H, A, G, K, d).permute(0, 2, 4, 1, 3, 5) + from_block.view(
        B, A, H, G, K, d
    ).permute(0, 1, 4, 2, 3, 5)
    return mixed.reshape(B, A, K, heads, d)
