"""One pass over lists of tokens of different lengths, each behind its own row of a cache."""

from collections.abc import Sequence

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.target import Target, TargetOutput


def read_ragged(
    model: Target,
    cache: KVCache,
    read: Sequence[Sequence[int]],
    taps: Sequence[int] = (),
) -> TargetOutput:
    """Let `model` read one list per active row of `cache`; shorter lists are padded at their end.

    Causal attention keeps what lies behind a list from what is in it; the caller cuts it off the
    cache. Outputs are `[n, longest, …]`. A target that packs rows computes no padding.
    """
    width = max(map(len, read))
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in read])
    starts = torch.tensor(cache.active_lengths)
    # padding may reach beyond the context, where a table of positions ends
    positions = (starts[:, None] + torch.arange(width)).clamp(max=model.max_positions - 1)
    return model.forward(
        ids.to(model.device),
        position_ids=positions.to(model.device),
        attention_mask=cache.masks(width, model),
        cache=cache,
        taps=taps,
        counts=[len(tokens) for tokens in read],
    )
