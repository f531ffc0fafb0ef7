"""Storage of one layer of a cache: keys and values of positions."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from dspark_train.decoding.cache import KVCache

KeysValues = tuple[torch.Tensor, torch.Tensor]


class RowLayer(CacheLayerMixin):
    """Storage `[rows, H, capacity, d]` of one layer. The lengths belong to the cache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "KVCache", index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros((self._cache.num_rows, x.shape[1], self._cache.capacity, x.shape[3]))
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Write `[n, H, q, d]` behind what the active rows hold; return views of the whole."""
        cache, q = self._cache, key_states.shape[2]
        if self._index == cache.first:
            cache.plan(key_states.shape[0], q, key_states.device)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        start, stop, end = *cache.active, cache.end
        keys, values = self.keys[start:stop], self.values[start:stop]
        if cache.scatter is None:
            keys[:, :, end - q : end] = key_states
            values[:, :, end - q : end] = value_states
        else:
            rows, columns = cache.scatter
            keys[rows, :, columns] = key_states.transpose(1, 2)
            values[rows, :, columns] = value_states.transpose(1, 2)
        if self._index == cache.last:
            cache.advance(q)
        return keys[:, :, :end], values[:, :, :end]

    def held(self, row: int, length: int) -> list[torch.Tensor]:
        """What a row holds at its first `length` positions."""
        return [self.keys[row, :, :length], self.values[row, :, :length]]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def grow(self) -> None:
        """Have storage for the capacity of the cache."""
        held, capacity = self.keys.shape[2], self._cache.capacity
        if held == capacity:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            # zeros: what lies behind a row's length is masked, but NaN would pass through a mask
            new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, :held] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self._cache.active_lengths)

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("lengths belong to the whole cache: use KVCache.truncate")
