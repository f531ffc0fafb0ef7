"""The head gives the model's own logits, whatever its family does to them."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_train.target import Target

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FULL = ["full_attention"] * 3
FAMILIES = [
    (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    (Gemma2ForCausalLM, Gemma2Config(**SIZES, layer_types=FULL, final_logit_softcapping=2.0)),
    (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25)),
    (
        GraniteForCausalLM,
        GraniteConfig(**SIZES, logits_scaling=4.0, embedding_multiplier=3.0),
    ),
    (GPT2LMHeadModel, GPT2Config(vocab_size=20, n_embd=16, n_layer=3, n_head=2)),
]


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_logits_and_taps_equal_the_models_own(
    family: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    torch.manual_seed(0)
    target = Target.wrap(family._from_config(config, attn_implementation="eager"))
    ids = torch.randint(20, (2, 7))
    own = target.model(input_ids=ids, output_hidden_states=True)
    output = target.forward(ids, taps=(0, 1))
    torch.testing.assert_close(target.head.logits(output.last_hidden), own.logits)
    assert torch.equal(output.features, torch.cat(own.hidden_states[1:3], dim=-1))
    assert target.vocab_size == 20


@pytest.mark.parametrize(("family", "config"), FAMILIES[:4])
def test_embed_is_what_enters_the_first_layer(
    family: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    target = Target.wrap(family._from_config(config, attn_implementation="eager"))
    ids = torch.randint(20, (1, 5))
    own = target.model(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(target.head.embed(ids), own.hidden_states[0])


def test_head_shares_the_models_weights_and_is_frozen(random_target) -> None:
    target = random_target()
    head = target.head
    assert head.projection.weight.data_ptr() == target.model.lm_head.weight.data_ptr()
    assert head.embedding.weight.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    assert not any(p.requires_grad for p in target.model.parameters())
    # gradients still pass through the frozen head to what is put in
    hidden = torch.randn(2, 16, requires_grad=True)
    head.logits(hidden).sum().backward()
    assert hidden.grad is not None


def test_an_unknown_way_of_scaling_logits_is_refused(random_target) -> None:
    model = random_target().model
    inner = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = inner(*args, **kwargs)
        output.logits = output.logits * 1.7  # no configuration field tells of this
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM differ"):
        Target.wrap(model)
