"""What a target must be: causal, full attention in every layer, a head that we can reproduce."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark_train.target.head import TargetHead


def refuse_unsupported(name: str, config: PretrainedConfig) -> None:
    """Refuse what the configuration already tells is not a causal, full-attention model.

    Raises:
        ValueError: naming the target and the part that is not supported.
    """
    advice = "choose a target that attends to its whole context in every layer"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"target {name}: {config.model_type} is an encoder-decoder, not causal")
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    others = sorted({kind for kind in layer_types or () if kind != "full_attention"})
    if others:
        raise ValueError(f"target {name}: layers of type {others} are not supported; {advice}")
    window = getattr(text, "sliding_window", None)
    # Families with layer_types say there which layers slide, and may leave an unused width here.
    if layer_types is None and window and window < (text.max_position_embeddings or 0):
        raise ValueError(
            f"target {name}: sliding_window={window} in a context of "
            f"{text.max_position_embeddings} is not supported; {advice}"
        )


def refuse_stateful(name: str, model: PreTrainedModel) -> None:
    """Refuse recurrent families, whose state cannot be rolled back after a rejected draft.

    Raises:
        ValueError: naming the target and its class.
    """
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"target {name}: {type(model).__name__} keeps a recurrent state, which cannot be "
            "rolled back after a rejected draft; choose a target with attention layers only"
        )


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
