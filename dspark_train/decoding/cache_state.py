"""Recurrent states in a cache, and the way back after a rejected draft.

A state folds all tokens into one tensor, so none can be cut off. Before a pass its layer keeps the
state as it is, and during the pass what its mixer is given. Of rows of which only the first tokens
stand (the rest were rejected drafts, or padding) the state is put back, and the mixer, alone of all
the target, reads these tokens again. Inputs of a causal model do not depend on what was rejected
behind them, so that gives the state of a fresh reading. It costs a round with a rejection one more
pass through the mixers, not through the target, and every pass a copy of the states.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dspark_train.decoding.cache_layer import RowLayer
from dspark_train.target.mixers import Kept, MixerState, NothingLayer

if TYPE_CHECKING:
    from dspark_train.decoding.cache import KVCache

# of a layer: (conv_states or recurrent_states, number within the mixer) -> [rows, …]
States = dict[tuple[str, int], torch.Tensor]


class StateLayer(MixerState):
    """States `[rows, …]` of one layer; zeros are the state before the first token.

    The mixer reads and writes the tensors `[n, …]` of the active rows in `conv_states` and
    `recurrent_states`, where transformers has them.
    """

    is_compileable = False

    def __init__(self, cache: "KVCache", index: int, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self._cache, self._index = cache, index
        self._stored: States = {}
        self._forget()

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored.values())

    def held(self, row: int, length: int) -> list[torch.Tensor]:
        """The states of a row, which stand for all `length` positions that it has read."""
        return [stored[row] for stored in self._stored.values()]

    def enter(self, hidden: torch.Tensor, read: Callable[[torch.Tensor], None]) -> None:
        """Keep what is needed to come back to any place of the pass that begins."""
        cache, rows = self._cache, slice(*self._cache.active)
        if self._index == cache.first:
            cache.plan(*hidden.shape[:2], hidden.device)
        self._show({key: stored[rows] for key, stored in self._stored.items()})
        self._before = {key: stored[rows].clone() for key, stored in self._stored.items()}
        self._hidden, self._read, self._span = hidden, read, cache.active

    def leave(self) -> None:
        """The pass goes on behind the mixer."""
        if self._index == self._cache.last:
            self._cache.advance(self._hidden.shape[1])

    @torch.inference_mode()
    def rewind(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        """Make the states of the active rows those after `lengths` of their `held` positions.

        Raises:
            ValueError: a length from before the last pass, other than 0.
        """
        again: dict[int, list[int]] = {}
        for i, (old, new) in enumerate(zip(held, lengths, strict=True)):
            if new == 0:
                for stored in self._stored.values():
                    stored[self._cache.active[0] + i] = 0
            elif new < old:
                again.setdefault(old - new, []).append(i)
        q = 0 if self._span != self._cache.active else self._hidden.shape[1]
        if max(again, default=0) > q:
            raise ValueError(
                f"cannot cut rows that hold {list(held)} to {list(lengths)}: their recurrent "
                f"states can be taken back over the {q} positions of the last pass only"
            )
        for cut, places in again.items():
            self._restore(places, q - cut)
        self._forget()

    def _restore(self, places: list[int], count: int) -> None:
        """States of the rows `places` of the last pass, after its first `count` positions."""
        states = {
            key: self._before[key][places]
            if key in self._before
            else stored.new_zeros((len(places), *stored.shape[1:]))
            for key, stored in self._stored.items()
        }
        if count:
            self._show(states)
            self._read(self._hidden[places, :count])
        rows = [self._span[0] + place for place in places]
        for key, stored in self._stored.items():
            stored[rows] = states[key]

    def _show(self, states: States) -> None:
        for (kind, number), tensor in states.items():
            getattr(self, kind)[number] = tensor
            self.has_previous_state[number] = True

    def _forget(self) -> None:
        self._before, self._hidden, self._read, self._span = {}, None, None, None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("states are made when a pass first writes them")

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Inputs `[n, C, q]` of a convolution behind the last ones; `[n, C, kernel + q]`."""
        kernel = conv_kernel_size or conv_states.shape[-1]
        state = self._writable(
            "conv_states", state_idx, conv_states, (conv_states.shape[1], kernel)
        )
        joined = torch.cat((state, conv_states), dim=-1)
        state.copy_(joined[..., -kernel:])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """The state `[n, …]` after the pass."""
        shape = recurrent_states.shape[1:]
        state = self._writable("recurrent_states", state_idx, recurrent_states, shape)
        return state.copy_(recurrent_states)

    def _writable(
        self, kind: str, number: int, like: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        if (kind, number) not in self._stored:
            stored = like.new_zeros((self._cache.num_rows, *shape))
            self._stored[kind, number] = stored
            self._show({(kind, number): stored[slice(*self._cache.active)]})
        return getattr(self, kind)[number]


class BothLayer(RowLayer, StateLayer):
    """A layer with attention and a mixer. Its attention tells the cache where a pass is."""

    def __init__(self, cache: "KVCache", index: int, number_of_states: int) -> None:
        StateLayer.__init__(self, cache, index, number_of_states)
        RowLayer.__init__(self, cache, index)

    @property
    def nbytes(self) -> int:
        return RowLayer.nbytes.fget(self) + StateLayer.nbytes.fget(self)

    def leave(self) -> None:
        """The pass goes on behind the mixer."""

    def held(self, row: int, length: int) -> list[torch.Tensor]:
        """Keys and values of a row at its first `length` positions, and its states."""
        return RowLayer.held(self, row, length) + StateLayer.held(self, row, length)


class EmptyLayer(NothingLayer):
    """A layer that keeps nothing, such as experts alone."""

    nbytes = 0

    def held(self, row: int, length: int) -> list[torch.Tensor]:
        """Nothing."""
        return []


def make_layer(cache: "KVCache", index: int, kept: Kept) -> RowLayer | StateLayer | EmptyLayer:
    """Storage for what a layer keeps."""
    if not kept.states:
        return RowLayer(cache, index) if kept.positions else EmptyLayer()
    return (BothLayer if kept.positions else StateLayer)(cache, index, kept.states)
