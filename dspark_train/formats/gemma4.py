"""DeepSpec's DSpark of Gemma 4: its layers as settings of a drafter, and back.

The file is a `gemma4_text` configuration of full layers only. They have a head size and, where
their values are the projected keys, a number of key/value heads of their own (`global_head_dim`,
`num_global_key_value_heads`); the rotary settings lie under the kind of layer.
"""

from typing import TYPE_CHECKING, Any

from dspark_train.drafter import DrafterConfig
from dspark_train.drafter.config import FULL, SLIDING

if TYPE_CHECKING:
    from dspark_train.formats.fields import Fields

# what makes a layer one of Gemma 4's, besides `keys_are_values`, which differs between them
LAYERS = {"sandwich_norms": True, "value_norm": True, "attention_scale": 1.0}
# what a draft layer does not have; DeepSpec writes these values always
FIXED: dict[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "enable_moe_block": (False,),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
}
# of experts and per-layer embeddings that are off, of images, of layers that slide
SILENT = (
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
    "vocab_size_per_layer_input",
    "use_bidirectional_attention",
    "target_text_model_type",
    "sliding_window",
)


def layer_settings(fields: "Fields") -> dict[str, Any]:
    """Settings of the drafter in place of Qwen's sizes.

    Raises:
        ValueError: layers of another kind than the full, dense ones of a draft.
    """
    types = fields.take("layer_types")
    for kind in sorted(set(types) - {FULL}):
        fields.refuse("layer_types", kind, f"{FULL} in every layer")
    for field, allowed in FIXED.items():
        if (value := fields.take(field, allowed[0])) not in allowed:
            fields.refuse(field, value, f"one of {list(allowed)}")
    for field in SILENT:
        fields.take(field, None)
    shared = fields.take("attention_k_eq_v")
    few, many = (
        fields.take(name, None) for name in ("num_global_key_value_heads", "num_key_value_heads")
    )
    heads = few if shared and few is not None else many
    if heads is None:
        fields.refuse("num_key_value_heads", None, "a value: it cannot be guessed")
    size = fields.take("head_dim", None)
    return {
        **LAYERS,
        "keys_are_values": shared,
        "num_key_value_heads": heads,
        "head_dim": fields.take("global_head_dim", size),
        "hidden_act": fields.take("hidden_activation"),
    }


def text_config(config: DrafterConfig) -> dict[str, Any]:
    """The backbone as a `gemma4_text` configuration."""
    rope = config.rope_parameters
    head = (config.target or {}).get("head") or {}
    return {
        "model_type": "gemma4_text",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "attention_k_eq_v": config.keys_are_values,
        "final_logit_softcapping": head.get("final_logit_softcapping"),
        "global_head_dim": config.head_dim,
        "head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "layer_types": [FULL] * config.num_hidden_layers,
        # both kinds are written, as a reader of the whole family looks for both
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": 10_000.0}},
        "sliding_window": 1024,
        "use_bidirectional_attention": None,
        **{field: allowed[0] for field, allowed in FIXED.items()},
        **{
            field: getattr(config, field)
            for field in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "rms_norm_eps",
                "vocab_size",
                "max_position_embeddings",
                "initializer_range",
            )
        },
        "vocab_size_per_layer_input": config.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
