"""What a target must be: causal, of layers that we can cache, with a head that we can reproduce."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from dspark_train.target.head import TargetHead
from dspark_train.target.mixers import kept_by_layers
from dspark_train.target.packing import SECOND, alone, close, trial


def refuse_unsupported(name: str, config: PretrainedConfig) -> None:
    """Refuse what the configuration already tells is not causal or cannot be cached.

    Raises:
        ValueError: naming the target and the part that is not supported.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"target {name}: {config.model_type} is an encoder-decoder, not causal")
    if shared := getattr(config.get_text_config(), "num_kv_shared_layers", None):
        raise ValueError(
            f"target {name}: {shared} layers read the keys and values of other layers, which is "
            "not supported; choose a target whose layers have their own"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"target {name}: {config.model_type} has local layers whose window is counted along "
            "the batch, not along its rows; choose another target"
        )
    kept_by_layers(name, config)


def sliding_window(
    name: str, config: PretrainedConfig, decoder: nn.Module
) -> tuple[int | None, bool]:
    """The width of the sliding layers, None without, and whether masks are given by layer type.

    Families whose layers differ take a mask for each type; the others one for all layers.

    Raises:
        ValueError: layers differ, but the family takes a single mask.
    """
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None, False  # a width that no layer uses
    if window is None or window >= (text.max_position_embeddings or sys.maxsize):
        return None, False
    by_type = "attention_mask, dict)" in inspect.getsource(type(decoder).forward)
    if layer_types is not None and len({*layer_types}) > 1 and not by_type:
        raise ValueError(
            f"target {name}: {type(decoder).__name__} has layers of several kinds "
            f"({sorted({*layer_types})}) but takes one mask for all; choose another target"
        )
    return window, by_type


@torch.no_grad()
def probe(name: str, model: PreTrainedModel, decoder: nn.Module, head: TargetHead) -> None:
    """Run the model once on six tokens and compare it with what we believe about it.

    Two things that no configuration field tells reliably: a later token must not change an
    earlier position, and the head must give the model's own logits (families scale them in ways
    that are not all known here).

    Raises:
        ValueError: naming the target and which of the two fails.
    """
    ids = torch.tensor([[0, 1, 0], [0, 1, 1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    hidden = decoder(input_ids=ids, use_cache=False)[0]
    tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
    moved = (hidden[0, :2] - hidden[1, :2]).abs().max()
    if moved > tolerance * hidden.abs().max():
        raise ValueError(
            f"target {name}: {type(model).__name__} is not causal, a later token changes earlier "
            "positions; choose a causal language model"
        )
    wrong = (head.logits(hidden).float() - logits.float()).abs().max()
    if wrong > tolerance * logits.abs().max().float():
        raise ValueError(
            f"target {name}: the logits of {type(model).__name__} differ from its LM head on its "
            f"last hidden state by {wrong:.3g}; its way of scaling them is not supported"
        )


def probe_rows(name: str, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
    """Run two rows of different lengths side by side, and one of them alone.

    Families whose attention is biased by distance (ALiBi) count it along the batch.

    Args:
        forward: `Target.forward`.

    Raises:
        ValueError: naming the target.
    """
    try:
        rows = trial(forward, DynamicCache, model.device)
        followed = close(rows[SECOND], alone(forward, DynamicCache, model.device))
    except Exception as error:  # whatever a family does with a mask that it does not know
        raise ValueError(
            f"target {name}: {type(model).__name__} does not take the masks of rows of different "
            f"lengths ({type(error).__name__}: {error}); choose another target"
        ) from error
    if not followed:
        raise ValueError(
            f"target {name}: {type(model).__name__} gives a row something else beside a longer "
            "one, so it cannot be decoded in batches; choose another target"
        )


@torch.no_grad()
def probe_states(name: str, model: PreTrainedModel, decoder: nn.Module, keyword: str) -> None:
    """Let the model read six tokens at once, and in pieces of two, three and one.

    Some families go on from a recurrent state with single tokens only, and read several as if
    nothing had come before; some bound time steps in passes over several tokens only.

    Args:
        keyword: name of the decoder's argument for a cache.

    Raises:
        ValueError: naming the target.
    """
    ids = torch.tensor([[0, 1, 1, 0, 1, 0]], device=model.device)
    whole = decoder(input_ids=ids, use_cache=False)[0]
    cache, pieces = DynamicCache(config=model.config), []
    for start, end in ((0, 2), (2, 5), (5, 6)):
        positions = torch.arange(start, end, device=model.device)[None]
        given = {"input_ids": ids[:, start:end], "position_ids": positions, keyword: cache}
        pieces.append(decoder(**given, use_cache=True)[0])
    wrong = (torch.cat(pieces, dim=1) - whole).abs().max() / whole.abs().max()
    if wrong > (1e-4 if model.dtype == torch.float32 else 1e-1):
        raise ValueError(
            f"target {name}: {type(model).__name__} reads tokens one at a time and several at once "
            f"to different ends (by {wrong:.2g}), so drafts cannot be verified in one pass; choose "
            "another target"
        )
