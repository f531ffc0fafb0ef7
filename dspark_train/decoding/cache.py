"""Keys and values of positions that were processed, preallocated, with a length per row.

Layers that keep a recurrent state instead have it put back after a rejected draft: see
`cache_state.py`.

What a cache holds is what its own forward passes consumed. A committed token that no pass has
read yet (the anchor) is in no cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from dspark_train.blocks import ContextSpan
from dspark_train.decoding.cache_layer import KeysValues, RowLayer
from dspark_train.decoding.cache_state import StateLayer, make_layer
from dspark_train.target import Target


class KVCache(Cache):
    """The target's cache under transformers' interface: rows of different lengths, no copies.

    A pass of q tokens over the active rows writes behind each row's own length, and the rows grow
    by q. `truncate` takes positions back. Capacity grows by blocks.

    Args:
        num_layers: layers that a pass updates, in order.
        num_rows: requests it holds.
        block: capacity is a multiple of this many positions.
    """

    def __init__(self, num_layers: int, num_rows: int = 1, block: int = 256) -> None:
        self.num_rows, self.block, self.capacity = num_rows, block, 0
        self.lengths = [0] * num_rows
        self.active = (0, num_rows)
        self.end = 0
        self.scatter: tuple[torch.Tensor, torch.Tensor] | None = None
        self.planned = False
        self._staircase: torch.Tensor | None = None
        self.first, self.last = 0, num_layers - 1  # layers in which a pass begins and ends
        super().__init__(layers=[RowLayer(self, index) for index in range(num_layers)])

    @classmethod
    def of(cls, target: Target, num_rows: int = 1) -> "KVCache":
        """A cache for what the layers of `target` keep, recurrent states included."""
        cache = cls(target.num_layers, num_rows)
        if target.recurrent:
            cache.layers = [make_layer(cache, i, kept) for i, kept in enumerate(target.kept)]
            keeping = [i for i, kept in enumerate(target.kept) if any(kept)]
            cache.first, cache.last = keeping[0], keeping[-1]
        return cache

    @property
    def active_lengths(self) -> list[int]:
        return self.lengths[self.active[0] : self.active[1]]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and states."""
        return sum(layer.nbytes for layer in self.layers)

    def activate(self, start: int, stop: int) -> None:
        """Rows `start:stop` take part in the passes that follow."""
        if not 0 <= start < stop <= self.num_rows:
            raise ValueError(f"rows {start}:{stop} are not within the {self.num_rows} of the cache")
        self.active = (start, stop)

    def reserve(self, length: int) -> None:
        """Have room for `length` positions per row, so that no pass has to grow the storage."""
        if length > self.capacity:
            self.capacity = -(-length // self.block) * self.block

    def plan(self, rows: int, q: int, device: torch.device) -> None:
        """Where the pass that begins writes; called by its first layer."""
        if self.planned:
            return
        lengths = self.active_lengths
        if rows != len(lengths):
            raise ValueError(
                f"a pass of {rows} rows, but {len(lengths)} rows of the cache are active"
            )
        self.end = max(lengths) + q
        self.reserve(self.end)
        self.scatter = None
        if min(lengths) != max(lengths):
            columns = torch.tensor(lengths, device=device)[:, None] + torch.arange(q, device=device)
            self.scatter = torch.arange(rows, device=device)[:, None], columns

    @contextmanager
    def writing(self, places: tuple[torch.Tensor, torch.Tensor], end: int) -> Iterator[None]:
        """Within, a pass over the first rows writes where it is told, and lengths stay as they are.

        Args:
            places: rows `[n, 1]` and positions `[n, q]`.
            end: positions that attention sees, at most the capacity.
        """
        active, self.active = self.active, (0, len(places[0]))
        self.scatter, self.end, self.planned = places, end, True
        try:
            yield
        finally:
            self.active, self.planned = active, False

    def grow(self) -> None:
        """Have storage for the whole capacity now, where there is any."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.grow()

    def advance(self, q: int) -> None:
        """The active rows hold q more positions; called by the last layer of a pass."""
        if self.planned:
            return
        for row in range(*self.active):
            self.lengths[row] += q

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll the active rows back to `lengths`: in constant time where all layers keep positions.

        Raises:
            ValueError: a length that a row does not hold, or that its recurrent states cannot
                return to.
        """
        for row, length in zip(range(*self.active), lengths, strict=True):
            if not 0 <= length <= self.lengths[row]:
                raise ValueError(
                    f"cannot cut row {row} to {length}: it holds {self.lengths[row]} positions"
                )
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.rewind(self.active_lengths, lengths)
        self.lengths[slice(*self.active)] = lengths

    def rearrange(self, width: int, places: Sequence[Sequence[int]]) -> None:
        """Of the last `width` positions of the active rows, put some first, in the given order.

        Args:
            width: positions of the last pass.
            places: which of them, one list a row, for instance the path of a tree. What lies
                behind them afterwards means nothing: cut it off.
        """
        longest = max(map(len, places))
        moved = [i for i, chosen in enumerate(places) if list(chosen) != list(range(len(chosen)))]
        if not moved:
            return
        device = self.layers[0].keys.device
        order = [[*places[i], *range(len(places[i]), longest)] for i in moved]
        rows = torch.tensor([self.active[0] + i for i in moved], device=device)[:, None]
        first = torch.tensor([self.active_lengths[i] - width for i in moved], device=device)
        sources = first[:, None] + torch.tensor(order, device=device)
        columns = first[:, None] + torch.arange(longest, device=device)
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                stored[rows, :, columns] = stored[rows, :, sources]

    def move_row(self, source: int, destination: int) -> None:
        """Copy a row over another one."""
        length = self.lengths[source]
        for layer in self.layers:
            for stored, moved in zip(
                layer.held(destination, length), layer.held(source, length), strict=True
            ):
                stored.copy_(moved)
        self.lengths[destination] = length

    def difference(self, row: int, other: "KVCache") -> float:
        """Largest difference to the only row of `other`, relative to the largest entry there.

        Raises:
            ValueError: rows of different lengths.
        """
        length = self.lengths[row]
        if length != other.lengths[0]:
            raise ValueError(
                f"row {row} of a cache holds {length} positions, expected {other.lengths[0]}"
            )
        worst = 0.0
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            for held, fresh in zip(ours.held(row, length), theirs.held(0, length), strict=True):
                held, fresh = held.float(), fresh.float()
                scale = fresh.abs().max().clamp(min=1e-12)
                worst = max(worst, float((held - fresh).abs().max() / scale))
        return worst

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.active_lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def masks(self, q: int, target: Target) -> torch.Tensor | dict[str, Any] | None:
        """What `Target.forward` takes as attention mask for the next pass of q tokens.

        The cache keeps all positions, those outside a sliding window too: so a rollback across
        the window's edge is as good as any other. The mask alone makes the window.
        """
        window, (dtype, device) = target.sliding_window, (target.dtype, target.device)
        if window is None:
            return self.mask(q, dtype, device)
        sliding = self.mask(q, dtype, device, window)
        if not target.masks_by_layer_type:
            return sliding
        masks = {"full_attention": self.mask(q, dtype, device), "sliding_attention": sliding}
        if q > 1:  # in a dictionary None means that everything is visible
            past = max(self.active_lengths)
            for kind, mask in masks.items():
                masks[kind] = self._stairs(past, q, dtype, device) if mask is None else mask
        return masks

    def mask(
        self,
        q: int,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
    ) -> torch.Tensor | None:
        """Additive attention mask `[n or 1, 1, q, end]` for the next pass of q tokens.

        None where attention needs none: equal rows that are empty (plain causal) or get one token.

        Args:
            window: positions that a token sees, its own included; None: all before it.
        """
        lengths = self.active_lengths
        longest = max(lengths)
        if window is None or longest + q <= window:
            if min(lengths) == longest:
                if q == 1 or longest == 0:
                    return None
                return self._stairs(longest, q, dtype, device)
            window = longest + q
        last = torch.tensor(lengths, device=device)[:, None] + torch.arange(q, device=device)
        return additive_mask(last, longest + q, dtype, window)

    def _stairs(
        self, past: int, q: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        # one buffer [Q, past | Q]: zeros, then a triangle; every pass reads a window of it
        stairs = self._staircase
        if stairs is None or stairs.shape[0] < q or stairs.shape[1] - stairs.shape[0] < past:
            size, room = max(q, 16), max(past, self.capacity)
            triangle = torch.full((size, size), torch.finfo(dtype).min, dtype=dtype).triu(1)
            stairs = torch.cat((torch.zeros(size, room, dtype=dtype), triangle), dim=1).to(device)
            self._staircase = stairs
        room = stairs.shape[1] - stairs.shape[0]
        return stairs[None, None, :q, room - past : room + q]


def additive_mask(
    last: torch.Tensor, end: int, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """Attention mask `[n, 1, q, end]` of tokens at positions `last` `[n, q]`.

    Args:
        window: positions that a token sees, its own included; None: all before it.
    """
    columns = torch.arange(end, device=last.device)
    hidden = columns > last[:, :, None]
    if window is not None:
        hidden = hidden | (columns <= last[:, :, None] - window)
    lowest = torch.finfo(dtype).min
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, lowest)[
        :, None
    ]


class DraftCache(KVCache):
    """The drafter's keys and values of context positions. Its lengths are its own."""

    def append(self, context: list[KeysValues], counts: Sequence[int]) -> None:
        """Add keys and values `[n, H, q, d]` per layer to the active rows.

        Args:
            counts: positions of each row that stand, at most q.
        """
        lengths = [
            length + count for length, count in zip(self.active_lengths, counts, strict=True)
        ]
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            layer.update(keys, values)
        self.truncate(lengths)

    def context(self, end: int | None = None) -> list[KeysValues]:
        """Views `[n, H, end, d]` of the active rows per layer; None: up to the longest."""
        (start, stop), end = self.active, end or max(self.active_lengths)
        return [
            (layer.keys[start:stop, :, :end], layer.values[start:stop, :, :end])
            for layer in self.layers
        ]

    def visible(self, device: torch.device) -> ContextSpan | None:
        """Which positions of `context` the active rows hold; None: all of them."""
        lengths = self.active_lengths
        if min(lengths) == max(lengths):
            return None
        ends = torch.tensor(lengths, device=device)[:, None]
        return ContextSpan(torch.zeros_like(ends), ends)
