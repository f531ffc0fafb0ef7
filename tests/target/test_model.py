"""Loading a target, its forward with taps and cache, its chat template, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from dspark_train.target import Target
from dspark_train.target.support import refuse_unsupported

MESSAGES = [{"role": "user", "content": "please clean the red door"}]


def test_loaded_from_a_folder(tiny_target: Target) -> None:
    assert (tiny_target.num_layers, tiny_target.hidden_size) == (6, 64)
    assert tiny_target.vocab_size == 128 > len(tiny_target.tokenizer)
    assert tiny_target.max_positions == 128
    assert tiny_target.eos_ids == (tiny_target.tokenizer.eos_token_id,)
    assert tiny_target.dtype == torch.float32
    assert not tiny_target.model.training


def test_loaded_in_another_dtype(tiny_target: Target, tiny_target_folder: Path) -> None:
    half = Target.load(str(tiny_target_folder), dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    same = ("config_sha", "weights_sha")
    assert {k: half.fingerprint()[k] for k in same} == {
        k: tiny_target.fingerprint()[k] for k in same
    }


def test_fingerprint_tells_targets_apart(random_target: Callable[..., Target]) -> None:
    first, again, other = random_target(seed=0), random_target(seed=0), random_target(seed=1)
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint()["weights_sha"] != other.fingerprint()["weights_sha"]
    assert first.fingerprint()["config_sha"] == other.fingerprint()["config_sha"]
    wider = random_target(seed=0, intermediate_size=48)
    assert first.fingerprint()["config_sha"] != wider.fingerprint()["config_sha"]


def test_forward_runs_no_head_and_leaves_no_hook(random_target: Callable[..., Target]) -> None:
    target = random_target(num_layers=4)
    calls = []
    target.model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    ids = torch.randint(5, (2, 6))
    output = target.forward(ids, taps=(0, 2))
    assert not calls
    assert output.features.shape == (2, 6, 32)
    assert not any(layer._forward_hooks for layer in target.model.model.layers)
    assert target.forward(ids).features is None
    with pytest.raises(ValueError, match="last layer"):
        target.forward(ids, taps=(3,))


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_cache_in_both_spellings(
    random_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, keyword: str
) -> None:
    target = random_target()
    real = target._decoder.forward
    inner = target._cache_keyword

    def spelled(input_ids, position_ids, attention_mask, use_cache, **keywords):
        assert set(keywords) == {keyword}
        return real(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **{inner: keywords[keyword]},
        )

    monkeypatch.setattr(target._decoder, "forward", spelled)
    monkeypatch.setattr(target, "_cache_keyword", keyword)
    ids = torch.randint(5, (1, 8))
    whole = target.forward(ids, taps=(0, 1))
    cache = DynamicCache()
    parts = [target.forward(part, cache=cache, taps=(0, 1)) for part in ids.split([5, 1, 2], 1)]
    assert cache.get_seq_length() == 8
    features = torch.cat([part.features for part in parts], dim=1)
    torch.testing.assert_close(features, whole.features)
    hidden = torch.cat([part.last_hidden for part in parts], dim=1)
    torch.testing.assert_close(hidden, whole.last_hidden)


def test_spelling_is_read_from_the_signature(random_target: Callable[..., Target]) -> None:
    assert random_target()._cache_keyword in ("cache", "past_key_values")


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_masks_of_all_kinds_agree(tiny_target_folder: Path, attn_implementation: str) -> None:
    """Fault 37: a boolean mask must not be added to the scores as 0 and 1."""
    target = Target.load(
        str(tiny_target_folder), dtype="float32", attn_implementation=attn_implementation
    )
    ids = torch.randint(5, 60, (1, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, 9, 9).masked_fill(~causal, torch.finfo(torch.float32).min)
    expected = target.forward(ids).last_hidden
    for mask in (causal, additive, torch.ones(1, 9, dtype=torch.long)):
        hidden = target.forward(ids, attention_mask=mask).last_hidden
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    # and a mask of two documents side by side isolates them
    causal[..., 4:, :4] = False
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = target.forward(ids, attention_mask=causal, position_ids=positions).last_hidden
    alone = target.forward(ids[:, 4:]).last_hidden
    torch.testing.assert_close(packed[:, 4:], alone, atol=1e-5, rtol=1e-5)


def test_encode_chat(tiny_target: Target, random_target: Callable[..., Target]) -> None:
    text = tiny_target.tokenizer.decode(tiny_target.encode_chat(MESSAGES))
    assert text == "<|im_start|> user please clean the red door <|im_end|> <|im_start|> assistant"
    unfinished = tiny_target.encode_chat(MESSAGES, add_generation_prompt=False)
    assert len(unfinished) == len(tiny_target.encode_chat(MESSAGES)) - 2
    with pytest.raises(ValueError, match="target random has no chat template"):
        random_target().encode_chat(MESSAGES)


def test_a_template_that_refuses_says_which_roles(random_target: Callable[..., Target]) -> None:
    target = random_target()
    target.tokenizer.chat_template = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(ValueError, match=r"refuses roles \['user'\]: only users may speak"):
        target.encode_chat(MESSAGES)


def test_eos_ids(random_target: Callable[..., Target]) -> None:
    target = random_target()
    assert target.eos_ids == ()
    target.model.generation_config.eos_token_id = [3, 4, 3]
    assert Target.wrap(target.model).eos_ids == (3, 4)
    target.model.generation_config.eos_token_id = 2
    assert Target.wrap(target.model).eos_ids == (2,)


SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_windows_are_read_from_the_configuration() -> None:
    qwen = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    target = Target.wrap(Qwen3ForCausalLM(qwen))
    assert (target.sliding_window, target.masks_by_layer_type) == (8, True)
    target = Target.wrap(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)))
    assert (target.sliding_window, target.masks_by_layer_type) == (8, False)
    for window in (None, 64):  # a window as wide as the context is none
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))
        assert Target.wrap(model).sliding_window is None
    unused = Qwen3Config(**SMALL, use_sliding_window=False, sliding_window=8)
    assert Target.wrap(Qwen3ForCausalLM(unused)).sliding_window is None


def test_layers_that_cannot_be_cached_are_refused_by_name() -> None:
    config = Qwen3Config(**SMALL)
    config.layer_types = ["indexed_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"DynamicIndexedLayer .*'indexed_attention'"):
        refuse_unsupported("mine", config)
    config = Qwen3Config(**SMALL)
    config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="1 layers read the keys and values of other layers"):
        refuse_unsupported("mine", config)


def test_bidirectional_is_refused() -> None:
    torch.manual_seed(0)
    bert = BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        Target.wrap(BertLMHeadModel(bert))


def test_refused_while_loading(tmp_path: Path, tiny_target_folder: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Target.load(str(tmp_path))
    with pytest.raises(ValueError, match=r"'/nowhere/model' does not exist as a folder"):
        Target.load("/nowhere/model")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty is a folder without a config\.json"):
        Target.load(str(empty))
    with pytest.raises(ValueError, match=r"target\.dtype='int8'"):
        Target.load(str(tiny_target_folder), dtype="int8")
    with pytest.raises(ValueError, match="no_such_kernel"):
        Target.load(str(tiny_target_folder), attn_implementation="no_such_kernel")


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub\nmany more lines")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"target some/model .*couldn't connect.*local folder"):
        Target.load("some/model")


def test_damaged_and_incomplete_weights_are_refused(
    random_target: Callable[..., Target], save_target: Callable[[Target], Path]
) -> None:
    folder = save_target(random_target())
    assert Target.load(str(folder), dtype="float32").tokenizer is not None
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="could not be loaded"):
        Target.load(str(folder), dtype="float32")
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"lacks 9 weights of LlamaForCausalLM.*layers\.3"):
        Target.load(str(folder), dtype="float32")


def test_layers_are_found_by_their_number(random_target: Callable[..., Target]) -> None:
    model: LlamaForCausalLM = random_target().model
    model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match="no list of 7 layers"):
        Target.wrap(model)


def test_loading_shows_no_bar_of_weights(
    tiny_target_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who decodes from Python asked for one; the setting of others stays as it was."""
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    Target.load(str(tiny_target_folder), dtype="float32")
    assert "Loading" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()
