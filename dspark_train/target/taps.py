"""Taps: forward hooks that keep the outputs of chosen decoder layers."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def decoder_layers(name: str, decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers, whatever the family calls it.

    Raises:
        ValueError: if there is no list of that length.
    """
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(
        f"target {name}: {type(decoder).__name__} has no list of {num_layers} layers to tap"
    )


@contextlib.contextmanager
def tapped(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Within the context, a forward pass fills the yielded dict: layer -> its output [B, S, D].

    Only the tapped layers carry a hook, and only for that long.
    """
    captured: dict[int, torch.Tensor] = {}

    def hook_of(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(hook_of(i)) for i in taps]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
