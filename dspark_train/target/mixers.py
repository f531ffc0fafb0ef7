"""Mixers: the modules that keep a recurrent state (Mamba, gated delta nets, short convolutions).

What a mixer has read is folded into a state of fixed size, so a cache cannot cut positions off it.
But the state before a pass and what the mixer was given in it tell the state after any part of
the pass. Here is who the mixers are, and how a cache learns what they are given.
"""

import contextlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

# what transformers has for a layer that keeps nothing, from 5.23 on
NothingLayer: type = getattr(cache_utils, "DummyLayer", object)
_POSITIONS = (DynamicLayer, DynamicSlidingWindowLayer)
_STATES = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
# how the code of a mixer reaches its state: itself, or (transformers 5.25) by a function
_STATE_CALLS = (".update_conv_state(", "causal_conv1d_forward(")
_CACHE_KEYWORDS = ("cache", "cache_params", "past_key_values", "past_key_value")


class Kept(NamedTuple):
    """What a layer leaves behind for later tokens.

    Attributes:
        positions: keys and values of every position.
        states: how many pairs of states its mixer has, 0 without a mixer.
    """

    positions: bool
    states: int


class MixerState(LinearAttentionCacheLayerMixin):
    """What a cache keeps of one mixer; it is told of every pass through that mixer."""

    @abstractmethod
    def enter(self, hidden: torch.Tensor, read: Callable[[torch.Tensor], None]) -> None:
        """The mixer is about to read `hidden` `[n, q, D]`.

        Args:
            read: lets the mixer alone read hidden states `[m, r, D]`, later.
        """

    @abstractmethod
    def leave(self) -> None:
        """The mixer has read it."""


def kept_by_layers(name: str, config: PretrainedConfig) -> tuple[Kept, ...]:
    """What each layer leaves behind for later tokens, as transformers' own cache has it.

    Raises:
        ValueError: naming the target and layers that keep something else.
    """
    layers = DynamicCache(config=config).layers
    known = (*_POSITIONS, *_STATES, NothingLayer)
    if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in known}):
        types = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())})
        raise ValueError(
            f"target {name}: layers that keep a {', '.join(unknown)} (layer types {types}) are not "
            "supported; choose a target whose layers attend to the whole context or to a sliding "
            "window, or keep a recurrent state"
        )
    return tuple(
        Kept(
            isinstance(layer, CacheLayerMixin),
            layer.number_of_states if isinstance(layer, _STATES) else 0,
        )
        for layer in layers
    )


def find_mixers(
    name: str, model: PreTrainedModel, decoder: nn.Module, kept: tuple[Kept, ...]
) -> dict[int, nn.Module]:
    """The mixer of every layer that has one, by the number of the layer.

    Raises:
        ValueError: naming the target: a recurrent state that nothing but its own code can hold.
    """
    mixers = {
        module.layer_idx: module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and _is_mixer(type(module))
    }
    expected = {i for i, what in enumerate(kept) if what.states}
    if mixers.keys() != expected or (getattr(model, "_is_stateful", False) and not mixers):
        raise ValueError(
            f"target {name}: {type(model).__name__} keeps a recurrent state in a way of its own, "
            "which cannot be put back after a rejected draft; choose another target"
        )
    return mixers


def _is_mixer(kind: type[nn.Module]) -> bool:
    # a module that writes keys and values too could not be run again for its state alone
    source = inspect.getsource(kind)
    return any(call in source for call in _STATE_CALLS) and "cache.update(" not in source


@contextlib.contextmanager
def announced(mixers: dict[int, nn.Module], cache: Cache) -> Iterator[None]:
    """Within the context, every `MixerState` of `cache` is told what its mixer is given."""
    handles = []
    for layer, mixer in mixers.items():
        state = cache.layers[layer]
        if isinstance(state, MixerState):
            before, after = _hooks(mixer, state, cache)
            handles.append(mixer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(mixer.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(mixer: nn.Module, state: MixerState, cache: Cache) -> tuple[Callable, Callable]:
    # the keyword was renamed between transformers releases
    parameters = inspect.signature(mixer.forward).parameters
    keyword = next(name for name in _CACHE_KEYWORDS if name in parameters)

    def read(hidden: torch.Tensor) -> None:
        mixer.forward(hidden, **{keyword: cache})  # not announced again

    def before(_mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state.enter(args[0] if args else kwargs["hidden_states"], read)

    def after(*_: Any) -> None:
        state.leave()

    return before, after
