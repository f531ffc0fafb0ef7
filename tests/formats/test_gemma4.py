"""DeepSpec's DSpark of Gemma 4: layers as those of transformers, files read and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as theirs

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.drafter.attention import RMSNorm
from dspark_train.drafter.two_part import PartMask
from dspark_train.formats import load_config, load_drafter, refuse_uncarried, write
from dspark_train.formats.destinations import carriers
from dspark_train.stages.export import compare
from dspark_train.target import Target
from tests.random_drafter import make_drafter

FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
ROPE = {"full_attention": FULL, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
LAYERS = {
    "hidden_act": "gelu_pytorch_tanh",
    "sandwich_norms": True,
    "value_norm": True,
    "keys_are_values": True,
    "attention_scale": 1.0,
    "rope_parameters": FULL,
}
SIZES = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": ROPE,
    "max_position_embeddings": 128,
    "sliding_window": 8,
}


def family(**fields: Any) -> Gemma4TextConfig:
    config = Gemma4TextConfig(**SIZES | {"initializer_range": 0.3} | fields)
    config._attn_implementation = "eager"
    return config


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    config = family(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Target.wrap(Gemma4ForCausalLM(config).eval())


def drafter_for(target: Target, **fields: Any) -> Drafter:
    """Large random weights, norms too; a scalar that is not one."""
    drafter = make_drafter(target, **LAYERS | fields)
    drafter.config.target = {"name": "tiny/gemma", "head": target.head.facts}
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for layer in drafter.layers:
        layer.layer_scalar.fill_(0.75)
    return drafter.eval()


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_a_draft_layer_is_the_familys_own(shared: bool) -> None:
    """The first positions of a sequence as context, the others as the block, of one layer."""
    S, K = 5, 4
    torch.manual_seed(1)
    config = family(num_hidden_layers=1, layer_types=["full_attention"], attention_k_eq_v=shared)
    layer = theirs.Gemma4TextDecoderLayer(config, 0).eval()
    for name, parameter in layer.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else parameter.normal_()
    layer.layer_scalar.fill_(0.6)
    x, positions = torch.randn(1, S + K, 32), torch.arange(S + K)[None]
    angles = theirs.Gemma4TextRotaryEmbedding(config)(x, positions, "full_attention")
    expected = layer(x, position_embeddings=angles, shared_kv_states={})

    settings = LAYERS | {"keys_are_values": shared}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1 if shared else 2, "head_dim": 16}
    ours = Drafter(
        DrafterConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, **heads, **settings
        )
    )
    ours.layers[0].load_state_dict(layer.state_dict())
    block, rotation = ours.layers[0], ours.rotary(positions)
    assert torch.equal(rotation[0], angles[0])
    before = tuple(part[:, :S] for part in rotation)
    context = block.self_attn.keys_values(block.input_layernorm(x[:, :S]), before)
    after = tuple(part[:, None, S:] for part in rotation)
    found = block(x[:, None, S:], after, context, PartMask())
    torch.testing.assert_close(found[:, 0], expected[:, S:], rtol=1e-5, atol=1e-5)


def test_norms_round_as_the_familys() -> None:
    torch.manual_seed(0)
    ours, gemmas = RMSNorm(32, 1e-6, wide=True), theirs.Gemma4RMSNorm(32)
    for norm in (ours, gemmas):
        norm.weight.data = torch.linspace(0.3, 1.7, 32).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    assert torch.equal(ours(x), gemmas(x))
    ours.wide = False  # Qwen's, which rounds twice
    assert not torch.equal(ours(x), gemmas(x))


@pytest.mark.parametrize("name", ["native", "deepspec", "vllm"])
def test_they_arrive_and_decode_as_in_memory(target: Target, tmp_path: Path, name: str) -> None:
    drafter = drafter_for(target)
    assert carriers(drafter.config) == ["native", "deepspec", "vllm"]
    write(tmp_path / name, name, drafter, target.head)
    compare(tmp_path / name, name, drafter, target, [1, 4, 2, 0, 3])
    if name == "native":
        return
    tensors = load_file(tmp_path / name / "model.safetensors")
    assert "layers.0.self_attn.v_proj.weight" not in tensors
    assert {"lm_head.weight", "embed_tokens.weight"} <= set(tensors)  # both readers want them
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert {f"layers.0.{norm}_layernorm.weight" for norm in norms} <= set(tensors)
    assert tensors["layers.0.layer_scalar"].tolist() == [0.75]
    fields = json.loads((tmp_path / name / "config.json").read_text())
    assert fields["architectures"] == ["Gemma4DSparkModel"]
    assert (fields["model_type"], fields["attention_k_eq_v"]) == ("gemma4_text", True)
    assert fields["rope_parameters"]["full_attention"] == FULL
    assert fields["final_logit_softcapping"] == 30.0
    again = Gemma4TextConfig.from_pretrained(tmp_path / name)
    assert again.per_layer_config[0].head_dim == drafter.config.head_dim


# the fields of DeepSpec's published drafter for Gemma 4 12B, at the sizes of a tiny one
PUBLISHED = {
    "architectures": ["Gemma4DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "block_size": 4,
    "bos_token_id": 2,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 8,
    "head_dim": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "layer_types": ["full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": 4,
    "mask_token_id": 0,
    "max_position_embeddings": 2048,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_anchors": 512,
    "num_attention_heads": 2,
    "num_experts": None,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "num_target_layers": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {**ROPE, "rope_theta": None, "rope_type": "default"},
    "sliding_window": 1024,
    "target_layer_ids": [0],
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "tie_word_embeddings": False,
    "top_k_experts": None,
    "transformers_version": "5.10.2",
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 12,
    "vocab_size_per_layer_input": 12,
}


def published(folder: Path, target: Target, **fields: Any) -> tuple[Path, Drafter]:
    drafter = drafter_for(target)
    write(folder, "deepspec", drafter, target.head)
    (folder / "config.json").write_text(json.dumps(PUBLISHED | fields))
    return folder, drafter


def test_the_published_layout_is_read(target: Target, tmp_path: Path) -> None:
    """Sizes are those of full layers, the head's soft-cap and scale those of the target."""
    folder, drafter = published(tmp_path / "published", target)
    found = load_drafter(folder, head=target.head)
    for key in DrafterConfig.__annotations__:
        if key not in ("target", "initializer_range"):
            assert getattr(found.config, key) == getattr(drafter.config, key), key
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    head = found.config.target["head"]
    assert head["final_logit_softcapping"] == 30.0
    assert head["input_embedding_scale"] == pytest.approx(32**0.5)


REFUSED = {
    "experts": ({"enable_moe_block": True}, r"enable_moe_block=True, expected one of \[False\]"),
    "per-layer inputs": ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8"),
    "sliding": ({"layer_types": ["sliding_attention"]}, "layer_types='sliding_attention'"),
    "attention": ({"attention_k_eq_v": None}, "attention_k_eq_v=None, expected a value"),
    "unknown": ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0, expected no such"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unknown_is_refused(target: Target, tmp_path: Path, case: str) -> None:
    fields, message = REFUSED[case]
    folder, _ = published(tmp_path / "published", target, **fields)
    with pytest.raises(ValueError, match=message):
        load_config(folder)


def test_who_cannot_carry_them_says_so(target: Target) -> None:
    for name in ("sglang", "speculators", "dflash", "transformers"):
        with pytest.raises(ValueError, match=r"the layers of Gemma 4.*\[native, deepspec, vllm\]"):
            refuse_uncarried(name, drafter_for(target).config)
    for changed in ({"draft_ids": [0, 3, 5]}, {"sample_from_anchor": False}):
        assert carriers(drafter_for(target, **changed).config) == ["native"]
    for head in ("gated", "rnn", None):
        assert carriers(drafter_for(target, head=head).config) == ["native", "deepspec"]
    mixed = drafter_for(target).config
    mixed.value_norm = False
    with pytest.raises(ValueError, match=r"value_norm=False.*mixture that only the format native"):
        refuse_uncarried("vllm", mixed)
