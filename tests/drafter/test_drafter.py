"""Saving, loading and refusing drafters."""

from pathlib import Path

import pytest
import torch

from dspark_train.blocks import Sight
from dspark_train.drafter import Drafter, DrafterConfig


@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_round_trip_is_bit_equal(kind: str | None, tmp_path: Path) -> None:
    drafter = Drafter(DrafterConfig(markov_head_type=kind, confidence_temperatures=[1.5] * 7))
    drafter.save_pretrained(tmp_path)
    again = Drafter.from_pretrained(tmp_path)
    for key in DrafterConfig.__annotations__:
        assert getattr(again.config, key) == getattr(drafter.config, key), key
    assert set(again.state_dict()) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_window_without_layer_types_makes_all_layers_slide(tmp_path: Path) -> None:
    Drafter(DrafterConfig(sliding_window=8)).save_pretrained(tmp_path)
    assert Drafter.from_pretrained(tmp_path).config.windows == [8, 8]
    mixed = ["full_attention", "sliding_attention"]
    assert DrafterConfig(sliding_window=8, layer_types=mixed).windows == [None, 8]
    assert DrafterConfig().windows == [None, None]


def test_what_each_layer_sees() -> None:
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    whole, causal = Sight(), Sight(causal=True)
    assert DrafterConfig(**mixed).sights == [whole, Sight(9)]
    assert DrafterConfig(**mixed, causal_blocks="sliding").sights == [whole, Sight(9, False, True)]
    from_anchor = DrafterConfig(**mixed, causal_blocks="all", window_from="anchor")
    assert from_anchor.sights == [causal, Sight(9, True, True)]
    assert DrafterConfig(causal_blocks="sliding").sights == [whole, whole]


def test_rotary_angles_do_not_depend_on_the_dtype_it_was_loaded_in(tmp_path: Path) -> None:
    """Loading a bf16 file makes bf16 the default dtype while the model is built."""
    drafter = Drafter(DrafterConfig())
    drafter.bfloat16().save_pretrained(tmp_path)
    again = Drafter.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.rotary.frequencies.dtype == torch.float32
    assert torch.equal(again.rotary.frequencies, drafter.rotary.frequencies)


def test_other_rotary_types_come_from_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    Drafter(DrafterConfig(rope_parameters=rope)).save_pretrained(tmp_path)
    scaled = Drafter.from_pretrained(tmp_path).rotary
    plain = Drafter(DrafterConfig()).rotary
    torch.testing.assert_close(scaled.frequencies * 4, plain.frequencies)


def test_tensor_names_are_those_of_the_ecosystem() -> None:
    names = set(Drafter(DrafterConfig(num_hidden_layers=1)).state_dict())
    assert names == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        *(f"layers.0.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")),
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"layers.0.self_attn.{name}_norm.weight" for name in "qk"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_size": 1, "sample_from_anchor": False}, "block_size=1"),
        ({"mask_token_id": 128}, "mask_token_id=128"),
        ({"target_layer_ids": [1, 3]}, r"target_layer_ids=\[1, 3\]"),
        ({"target_layer_ids": [2, 1]}, r"target_layer_ids=\[2, 1\]"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"sliding_window": 6}, "sliding_window=6, expected at least block_size=7"),
        ({"sliding_window": 0, "window_from": "anchor"}, "sliding_window=0, expected at least 1"),
        ({"window_from": "start"}, "window_from='start', expected one of"),
        ({"causal_blocks": "some"}, "causal_blocks='some', expected one of"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 9}, "sliding_window=9"),
        ({"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\], expected"),
        ({"confidence_shifts": [0.1]}, r"confidence_shifts=\[0.1\], expected 7 numbers"),
        ({"confidence_shifts": 0.1}, r"confidence_shifts=0.1, expected 7 numbers"),
        ({"confidence_shifts": ["0"] * 7}, r"confidence_shifts=\['0'.*, expected 7 numbers"),
        ({"confidence_shifts": [[0.0]] * 7}, r"confidence_shifts=\[\[0.0\].*, expected 7 numbers"),
        ({"confidence_shifts": [None] * 7}, r"confidence_shifts=\[None.*, expected 7 numbers"),
        ({"confidence_shifts": [float("inf")] * 7}, r"confidence_shifts=\[inf.*, expected 7"),
        ({"confidence_shifts": [10**400] * 7}, "confidence_shifts=.*, expected 7 numbers"),
        ({"confidence_shifts": [True] * 7}, "confidence_shifts=.*, expected 7 numbers"),
        ({"confidence_temperatures": [1.0]}, r"confidence_temperatures=\[1.0\]"),
        ({"confidence_temperatures": [0.0] * 7}, r"confidence_temperatures=\[0.0.*7 positive num"),
        ({"confidence_temperatures": [float("nan")] * 7}, r"confidence_temperatures=\[nan"),
        ({"unshifted_temperatures": [-1.0] * 7}, r"unshifted_temperatures=\[-1.0.*7 positive num"),
    ],
)
def test_contradictions_are_refused_by_name(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DrafterConfig(**settings)


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError, match=r"mask_token_id=-1.*target_layer_ids=\[9\]"):
        DrafterConfig(mask_token_id=-1, target_layer_ids=[9])
