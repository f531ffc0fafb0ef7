"""From the fields of a foreign config.json to a drafter's configuration; nothing is guessed."""

from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark_train.drafter import DrafterConfig
from dspark_train.drafter.config import FULL, MARKOV_HEADS, SLIDING
from dspark_train.formats.gemma4 import layer_settings
from dspark_train.formats.table import (
    GEMMA4,
    PLAIN_LAYOUTS,
    SPECULATORS,
    STRIPPED_ROPE,
    Layout,
    without_inherited,
)

# what means the same for them and for us
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
)
# which Gemma 4 says per kind of layer
OF_A_LAYER = ("num_key_value_heads", "head_dim")
OPTIONAL_SIZES = (
    "hidden_act",
    "attention_bias",
    "max_position_embeddings",
    "initializer_range",
)
# the only values that a drafter of ours can have; null stands for absent
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3", "dspark", "gemma4_text"),
    "mlp_bias": (False,),
    "attention_mode": ("gqa",),
    "projector_type": ("dspark", "dflash", "dflash2"),
    "attention_dropout": (0, 0.0),
}
HEAD_TENSORS = {
    "markov_head.gate_proj.weight": "gated",
    "markov_head.joint_proj.weight": "rnn",
}
# what says nothing about inference with full attention, or is said better elsewhere
SILENT = frozenset(
    [
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "max_window_layers",
        "sliding_window",
        "tie_word_embeddings",
        "num_anchors",
        "confidence_head_alpha",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "base_model",
        "target_model_type",
    ]
)


def layout_of(source: str, config: Mapping[str, Any]) -> Layout:
    """The layout that a config.json is written in.

    Raises:
        ValueError: an architecture or type that is not in the table.
    """
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS:
            raise ValueError(
                f"checkpoint {source} has speculators_model_type={kind!r}, expected one of "
                f"{sorted(SPECULATORS)}"
            )
        layouts: tuple[Layout, ...] = (SPECULATORS[kind],)
    else:
        layouts = PLAIN_LAYOUTS
    found = config.get("architectures") or []
    for layout in layouts:
        if len(found) == 1 and found[0] in (layout.architecture, *layout.also):
            return layout
    known = [name for layout in layouts for name in (layout.architecture, *layout.also)]
    raise ValueError(
        f"checkpoint {source} is not a drafter: its config.json says model_type="
        f"{config.get('model_type')!r} and architectures={found}, expected model_type="
        f"{DrafterConfig.model_type!r} or one architecture of {known}"
    )


class Fields:
    """The fields of one config.json, taken one by one; what is never taken is unknown."""

    def __init__(self, source: str, layout: Layout, config: Mapping[str, Any]) -> None:
        self.source, self.layout = source, layout
        self.levels = [dict(config)]
        for inner in (layout.sizes_in, layout.draft_in):
            if inner and (nested := self.levels[0].pop(inner, None)) is not None:
                if not isinstance(nested, dict):
                    self.refuse(inner, nested, "an object")
                self.levels.append(dict(nested))

    def refuse(self, field: str, value: Any, expected: str) -> None:
        raise ValueError(
            f"checkpoint {self.source} ({self.layout.name}): {field}={value!r}, expected {expected}"
        )

    def take(self, field: str, default: Any = ...) -> Any:
        """The value of a field wherever it lies; null counts as absent.

        Raises:
            ValueError: it is missing without a default, or said twice differently.
        """
        said = [level.pop(field) for level in self.levels if field in level]
        values = [value for value in said if value is not None]
        if any(value != values[0] for value in values):
            self.refuse(field, values, "the same value at the top and inside")
        if values:
            return values[0]
        if default is ...:
            self.refuse(field, None, "a value: it cannot be guessed")
        return default

    def finish(self) -> None:
        """Refuse whatever was not taken."""
        for field, allowed in FIXED.items():
            value = self.take(field, None)
            if value is not None and value not in allowed:
                self.refuse(field, value, f"one of {list(allowed)}")
        for level in self.levels:
            for field in sorted(set(level) - SILENT):
                if level[field] is not None:
                    self.refuse(field, level[field], "no such field: its meaning is not known here")


def drafter_config(
    source: str, layout: Layout, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> DrafterConfig:
    """The configuration of a foreign checkpoint, from its config.json and its tensors' shapes.

    Raises:
        ValueError: an unknown field, a value that a drafter here cannot have, or a missing one.
    """
    fields = Fields(source, layout, content)
    target = fields.levels[0].get("speculators_config") or {}
    name = (target.get("verifier") or {}).get("name_or_path")
    gemma4 = layout.family == GEMMA4
    sizes = {f: fields.take(f) for f in SIZES if not gemma4 or f not in OF_A_LAYER}
    for field in OPTIONAL_SIZES:
        if (value := fields.take(field, None)) is not None:
            sizes[field] = value
    sizes |= layer_settings(fields) if gemma4 else _windows(fields)
    if fields.take("target_hidden_size", sizes["hidden_size"]) != sizes["hidden_size"]:
        fields.refuse("target_hidden_size", "another", f"hidden_size={sizes['hidden_size']}")
    taps = fields.take(layout.taps)
    if layout.tap_offset == 0 and -1 in taps:
        fields.refuse(layout.taps, taps, "layers from 0 on (the embedding cannot be tapped)")
    draft_vocabulary = fields.take("draft_vocab_size", sizes["vocab_size"])
    head_scales = {
        "output_multiplier": fields.take("output_multiplier", 1.0),
        "final_logit_softcapping": fields.take("final_logit_softcapping", None),
        "input_embedding_scale": sizes["hidden_size"] ** 0.5
        if gemma4
        else fields.take("input_embedding_scale", 1.0),
    }
    record: dict[str, Any] = {"name": name} if name else {}
    if layout.kind == "dflash2" or gemma4:
        record["head"] = head_scales
    elif any(value not in (None, 1.0) for value in head_scales.values()):
        fields.refuse(
            "output_multiplier and the like", head_scales, "none but in DFlash2 and Gemma 4"
        )
    config = DrafterConfig(
        **sizes,
        rope_parameters=_rope(fields),
        block_size=fields.take("block_size"),
        mask_token_id=fields.take("mask_token_id"),
        target_layer_ids=[tap - layout.tap_offset for tap in taps],
        num_target_layers=fields.take("num_target_layers", None),
        sample_from_anchor=fields.take("sample_from_anchor", layout.sample_from_anchor),
        draft_vocab_size=None if draft_vocabulary == sizes["vocab_size"] else draft_vocabulary,
        target=record or None,
        **_heads(fields, shapes),
    )
    fields.finish()
    return config


def _windows(fields: Fields) -> dict[str, Any]:
    """Which layers slide, where their windows begin, and which blocks are causal."""
    types, window = fields.take("layer_types", []), fields.take("sliding_window", None)
    fields.take("use_sliding_window", None)
    slides = SLIDING in types
    for kind in sorted(set(types) - {FULL, SLIDING}):
        fields.refuse("layer_types", kind, f"{FULL} or {SLIDING}")
    settings = {"layer_types": types, "sliding_window": window} if slides else {}
    causal = fields.take("is_causal", fields.take("causal", None))
    if fields.layout.speculators:
        # windows begin a fixed distance before the anchor; full layers are never causal
        if causal not in (None, False):
            fields.refuse("is_causal", causal, "false: full layers see whole blocks there")
        both = fields.take("sliding_window_non_causal", None)
        if slides and both is None:
            expected = "true or false beside sliding layers: its readers differ in the default"
            fields.refuse("sliding_window_non_causal", both, expected)
        return settings | (
            {"window_from": "anchor", "causal_blocks": "none" if both else "sliding"}
            if slides
            else {}
        )
    if causal not in (None, False, True):
        fields.refuse("is_causal", causal, "true, false or null")
    # where nothing is said, sliding layers are causal and full ones are not
    silent = "sliding" if slides else "none"
    return settings | {"causal_blocks": {None: silent, False: "none", True: "all"}[causal]}


def _heads(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    kind = fields.layout.kind
    if kind == "dflash2":
        return {
            "markov_head_type": "selector",
            "markov_rank": fields.take("selector_rank"),
            "selector_top_k": fields.take("selector_top_k"),
            "conv_kernel_size": fields.take("conv_kernel_size"),
            "conv_group_size": fields.take("conv_group_size"),
            "enable_confidence_head": False,
        }
    if kind == "dflash":
        return {"markov_head_type": None, "enable_confidence_head": False}
    # where the fields are silent, the tensors tell
    rank = fields.take("markov_rank", shapes.get("markov_head.markov_w1.weight", (0, 0))[1])
    told = next((head for name, head in HEAD_TENSORS.items() if name in shapes), "vanilla")
    head = fields.take("markov_head_type", told)
    if rank > 0 and head not in MARKOV_HEADS[:3]:
        fields.refuse("markov_head_type", head, f"one of {MARKOV_HEADS[:3]}")
    width = shapes.get("confidence_head.proj.weight", (1, 0))[1]
    hidden = shapes.get("hidden_norm.weight", (0,))[0]
    return {
        "markov_head_type": head if rank > 0 else None,
        "markov_rank": rank or 1,
        "enable_confidence_head": fields.take("enable_confidence_head", width > 0),
        "confidence_head_with_markov": fields.take("confidence_head_with_markov", width > hidden),
    }


def _rope(fields: Fields) -> dict[str, Any]:
    """Rotary settings of both generations of transformers, without what a draft does not have."""
    new, scaling = fields.take("rope_parameters", None) or {}, fields.take("rope_scaling", None)
    theta = fields.take("rope_theta", None)
    # nested where layers of several kinds differ
    rope = without_inherited(new.get(FULL) or new or scaling or {})
    for field in STRIPPED_ROPE:
        fields.take(field, None)
    kind = rope.pop("type", None) or rope.pop("rope_type", None) or "default"
    if kind == "mrope":
        kind = "default"
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        fields.refuse("rope_type", kind, f"default or one of {sorted(ROPE_INIT_FUNCTIONS)}")
    rope.pop("rope_type", None)
    theta = rope.pop("rope_theta", theta)
    if theta is None:
        fields.refuse("rope_theta", None, "a number")
    return {"rope_type": kind, "rope_theta": float(theta), **rope}
