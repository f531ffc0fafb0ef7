"""Rows of different lengths through one pass without their padding.

Linear layers, norms and embeddings see one row of all tokens that count. Only attention, which
needs to know whose cache a token reads, sees the rows side by side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache


class Packing:
    """Which tokens of a padded pass `[n, q]` count: the first `counts[i]` of row i.

    Args:
        counts: one for each row, 1 or more; the longest is q.
        device: of the pass.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.rows, self.width = len(counts), max(counts)
        lengths = torch.tensor(counts)
        counted = torch.arange(self.width) < lengths[:, None]
        self.places = counted.flatten().nonzero()[:, 0].to(device)
        # padding repeats the last token of its row: it is finite, and nobody reads it
        first = lengths.cumsum(0) - lengths
        within = torch.arange(self.width).minimum(lengths[:, None] - 1)
        self.sources = (first[:, None] + within).flatten().to(device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, q, …]` to `[1, N, …]`: the tokens that count, row after row."""
        return x.flatten(0, 1)[self.places][None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, N, …]` to `[n, q, …]`."""
        return x[0][self.sources].unflatten(0, (self.rows, self.width))

    def unpack_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, H, N, d]` to `[n, H, q, d]`."""
        spread = x[0].index_select(1, self.sources)
        return spread.unflatten(1, (self.rows, self.width)).transpose(0, 1)


class PackedCache(Cache):
    """A cache of padded rows for a packed pass: what a layer computed is unpacked on its way in."""

    def __init__(self, cache: Cache, packing: Packing) -> None:
        super().__init__(layers=cache.layers)
        self.padded, self.packing = cache, packing

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unpack = self.packing.unpack_heads
        return self.padded.update(unpack(key_states), unpack(value_states), *args, **kwargs)


@torch.no_grad()
def agrees(decoder: nn.Module, cache_keyword: str, device: torch.device) -> bool:
    """Whether `decoder` gives the same packed and padded: a row of three tokens and one of one.

    Families that do not hand an argument on to their attention fail or give something else.
    """
    packing = Packing([3, 1], device)
    rows = ([[0, 1], [1, 0]], [[1, 0, 1], [0, 1, 1]])
    first, then = (torch.tensor(ids, device=device) for ids in rows)
    positions = torch.arange(5, device=device).expand(2, 5)
    mask = (positions[:1, None, :] <= positions[:1, 2:, None])[:, None]
    outputs = []
    for packed in (False, True):
        cache = DynamicCache()
        given, at, more = then, positions[:, 2:], {}
        if packed:
            given, at, more = packing.pack(given), packing.pack(at), {"packing": packing}
        try:
            decoder(input_ids=first, use_cache=True, **{cache_keyword: cache})
            more[cache_keyword] = PackedCache(cache, packing) if packed else cache
            output = decoder(
                input_ids=given, position_ids=at, attention_mask=mask, use_cache=True, **more
            )[0]
        except Exception:  # whatever a family does with an argument or a cache it does not know
            return False
        outputs.append(output if packed else packing.pack(output))
    padded, found = (output.float() for output in outputs)
    tolerance = 1e-4 if outputs[0].dtype == torch.float32 else 5e-2
    return bool((padded - found).abs().max() <= tolerance * padded.abs().max())
