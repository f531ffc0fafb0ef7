"""Rows of different lengths through one pass without their padding.

Linear layers, norms and embeddings see one row of all tokens that count. Only attention, which
needs to know whose cache a token reads, sees the rows side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache


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
def trial(
    forward: Callable[..., Any], cache: Callable[[], Cache], device: torch.device
) -> torch.Tensor:
    """Passes as batches are decoded: rows of three tokens and one, then a token for each.

    Args:
        forward: `Target.forward`.
        cache: makes one of transformers' own.

    Returns:
        Hidden states `[8, D]`: of the last token that both rows begin with, of the four that count
        and of one more for each. `alone` gives those of the second row, `SECOND`, by itself.
    """

    def read(rows: list[list[int]], counts: list[int], hidden: list[int]) -> torch.Tensor:
        """The next tokens of both rows; `hidden` columns are padding of the second."""
        held = together.get_seq_length()
        ids = torch.tensor(rows, device=device)
        positions = held + torch.arange(ids.shape[1], device=device).expand(2, -1)
        columns = torch.arange(held + ids.shape[1], device=device)
        mask = (columns <= positions[..., None])[:, None]
        mask[1, ..., hidden] = False
        positions = positions - torch.tensor([[0], [len(hidden)]], device=device)
        output = forward(
            ids, position_ids=positions, attention_mask=mask, cache=together, counts=counts
        ).last_hidden
        return torch.cat([output[i, :count] for i, count in enumerate(counts)])

    together = cache()
    first = torch.tensor([[0, 1], [1, 0]], device=device)
    outputs = [forward(first, cache=together).last_hidden[:, -1]]
    outputs.append(read([[1, 0, 1], [0, 1, 1]], [3, 1], []))
    outputs.append(read([[1], [0]], [1, 1], [3, 4]))
    return torch.cat(outputs)


# of the second row
SECOND = [1, 5, 7]


@torch.no_grad()
def alone(
    forward: Callable[..., Any], cache: Callable[[], Cache], device: torch.device
) -> torch.Tensor:
    """Hidden states `[3, D]` of the second row of a `trial`, with no row beside it."""
    held, outputs = cache(), []
    for ids in ([[1, 0]], [[0]], [[0]]):
        tokens = torch.tensor(ids, device=device)
        start = held.get_seq_length()
        positions = start + torch.arange(tokens.shape[1], device=device)[None]
        outputs.append(forward(tokens, position_ids=positions, cache=held).last_hidden[0, -1:])
    return torch.cat(outputs)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether hidden states agree, up to what their dtype rounds."""
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    wrong = (found.float() - expected.float()).abs().max()
    return bool(wrong <= tolerance * expected.float().abs().max())


def gives(expected: torch.Tensor, *tried: Any) -> bool:
    """Whether `trial(*tried)` runs and gives `expected`."""
    try:
        return close(trial(*tried), expected)
    except Exception:  # whatever a family does with an argument or a cache it does not know
        return False
