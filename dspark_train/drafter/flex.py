"""Block attention by FlexAttention: a block-sparse mask over context and slots, fused on CUDA.

All slots of all blocks are one sequence of A·K queries; keys are the S context positions followed
by the same A·K slots. The kernel skips every tile that the mask leaves empty, so slots of other
blocks cost nothing and compute grows linearly with the number of blocks.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark_train.drafter.two_part import KeysValues


def flex_mask(
    lowest: torch.Tensor, ends: torch.Tensor, context_length: int, causal: bool = False
) -> BlockMask:
    """The mask of one kind of layers for a batch, shared by its heads.

    Args:
        lowest: `[B, A, K]` first context position that each slot sees.
        ends: `[B, A]` first context position that no slot of a block sees.
        context_length: S.
        causal: whether slots see their own block up to themselves, instead of all of it.
    """
    B, A, K = lowest.shape
    low, high = lowest.flatten(1), ends.repeat_interleave(K, 1)

    def visible(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        # the context's keys end before its length, those of the slots begin there
        context = (key < context_length) & (key >= low[b, query]) & (key < high[b, query])
        own = (key >= context_length) & ((key - context_length) // K == query // K)
        if causal:
            own &= key - context_length <= query
        return context | own

    return create_block_mask(visible, B, None, A * K, context_length + A * K, device=low.device)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex_attend(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, mask: BlockMask, scale: float
) -> torch.Tensor:
    """`two_part_attend` with a block mask; compiled on CUDA, eager elsewhere."""
    B, A, K, heads, d = queries.shape
    dtype = own[1].dtype  # under autocast norms leave queries and keys wider than values
    keys, values = (
        torch.cat((past.to(dtype), new.to(dtype).transpose(1, 2).flatten(2, 3)), dim=2)
        for past, new in zip(context, own, strict=True)
    )
    attention = _compiled() if queries.is_cuda else flex_attention
    queries = queries.to(dtype).flatten(1, 2).transpose(1, 2)
    mixed = attention(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(B, A, K, heads, d)
