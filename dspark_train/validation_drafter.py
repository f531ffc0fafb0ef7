"""What can be known to be wrong with the shape of a drafter before there is a target."""

from collections.abc import Iterator
from typing import Any

from transformers.activations import ACT2FN

from dspark_train.config import DrafterSettings
from dspark_train.drafter.config import (
    CAUSAL_BLOCKS,
    MARKOV_HEADS,
    SLIDING,
    WINDOW_FROM,
    window_problems,
)


def drafter_checks(d: DrafterSettings) -> Iterator[tuple[bool, str, Any, str]]:
    """Whether a setting is right, its key, its value, and what is expected."""
    known = (None, *MARKOV_HEADS)
    expected = f"one of {MARKOV_HEADS} or null"
    yield d.markov_head_type in known, "drafter.markov_head_type", d.markov_head_type, expected
    least = 1 if d.sample_from_anchor else 2
    expected = "at least 1 (2 where sample_from_anchor is false, or nothing is proposed)"
    yield d.block_size >= least, "drafter.block_size", d.block_size, expected
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        value = getattr(d, key)
        expected = "a positive number, or null for the target's"
        yield value is None or value > 0, f"drafter.{key}", value, expected
    expected = "an even number, or null for the target's"
    yield (d.head_dim or 2) % 2 == 0, "drafter.head_dim", d.head_dim, expected
    heads, shared = d.num_attention_heads, d.num_key_value_heads
    fits = not heads or not shared or heads % shared == 0
    expected = f"a divisor of drafter.num_attention_heads={heads}"
    yield fits, "drafter.num_key_value_heads", shared, expected
    expected = "a token id, or null to choose one"
    yield (d.mask_token_id or 0) >= 0, "drafter.mask_token_id", d.mask_token_id, expected
    expected = "a positive number, or null"
    taps, few = d.conv_kernel_size, d.draft_vocab_size
    yield taps is None or taps > 0, "drafter.conv_kernel_size", taps, expected
    expected = "at least 2 tokens to choose between, or null for all"
    yield few is None or few > 1, "drafter.draft_vocab_size", few, expected
    types = d.layer_types
    if types is None and d.sliding_window is not None:
        types = [SLIDING] * d.num_hidden_layers
    least = d.block_size if d.window_from == "slot" else 1
    wrong = window_problems(types, d.sliding_window, d.num_hidden_layers, least)
    given = (d.sliding_window, d.layer_types)
    yield not wrong, "drafter.(sliding_window, layer_types)", given, "; ".join(wrong)
    for key, known in (("window_from", WINDOW_FROM), ("causal_blocks", CAUSAL_BLOCKS)):
        yield getattr(d, key) in known, f"drafter.{key}", getattr(d, key), f"one of {known}"
    slides = SLIDING in (types or [])
    expected = "slot where no layer slides: give drafter.sliding_window"
    yield slides or d.window_from != "anchor", "drafter.window_from", d.window_from, expected
    expected = "none or all where no layer slides: give drafter.sliding_window"
    yield slides or d.causal_blocks != "sliding", "drafter.causal_blocks", d.causal_blocks, expected
    scale, expected = d.attention_scale, "a positive number, or null for that of the head"
    yield scale is None or scale > 0, "drafter.attention_scale", scale, expected
    known, expected = d.hidden_act in ACT2FN, "an activation of transformers, such as silu"
    yield known, "drafter.hidden_act", d.hidden_act, expected
    share, expected = d.rotary_share, "a share in (0, 1], or null for all pairs"
    yield share is None or 0 < share <= 1, "drafter.rotary_share", share, expected
