"""Families whose attention is their own: packed as they are, or refused by name."""

import threading
from inspect import getmodule, getsource
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.target import Target
from dspark_train.target.cpu import GROUPED, can_pack
from tests import families

V = 128
HEADS = ("head_dim", "num_key_value_heads")
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK = {**MLA, **EXPERTS, "v_head_dim": 8, "moe_intermediate_size": 16}
DEEPSEEK["first_k_dense_replace"] = 1
ODD = {
    "knows sdpa by name": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, HEADS),
    "values of another width": ("DeepseekV3", DEEPSEEK, HEADS),
    "a mask for every head": ("Doge", {}, ()),
}
REFUSED = {
    "alibi": ("Bloom", {}, (), "does not take the masks"),
    "alibi by switch": ("Falcon", {"alibi": True}, HEADS, "does not take the masks"),
    "local layers": (
        "GPTNeo",
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
        (),
        "local layers whose window",
    ),
}


def make(name: str, fields: dict[str, Any], without: tuple[str, ...]) -> PreTrainedModel:
    sizes = {key: value for key, value in families.SIZES.items() if key not in without}
    config = getattr(transformers, f"{name}Config")(**(sizes | fields), vocab_size=V)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="no packed layout")
@pytest.mark.parametrize("why", ODD)
@pytest.mark.parametrize("proposer", ["plain", "lookup"])
def test_packed_it_is_the_model_itself(why: str, proposer: str) -> None:
    model = make(*ODD[why])
    prompts = [torch.randint(0, V, (k,)).tolist() for k in (1, 3, 9, 17)]
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    target = Target.wrap(model)
    target.pack()
    decoder = SpeculativeDecoder.from_pretrained(target=target, proposer=proposer)
    requests = [decoder.request(prompt, 12, eos_ids=()) for prompt in prompts]
    assert [r.tokens for r in decoder.run(requests, rows=3)] == expected
    assert decoder.generate(prompts[2], 12, eos_ids=()).tokens == expected[2]
    if why == "knows sdpa by name":  # until transformers 5.25, which takes any attention there
        by_name = '_attn_implementation == "sdpa" and' in getsource(getmodule(type(model)))
        assert by_name == (model.config._attn_implementation != GROUPED)


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_batched_is_refused_by_name(why: str) -> None:
    *what, said = REFUSED[why]
    with pytest.raises(ValueError, match=f"target odd: .*{said}.*choose another target"):
        Target.wrap(make(*what), name="odd")


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_passes_of_two_threads_do_not_meet(family: str) -> None:
    """One computes features, as online training does, while the other decodes."""
    target = Target.wrap(families.make(family, V))
    decoder = SpeculativeDecoder.from_pretrained(target=target, proposer="lookup")
    prompt = torch.randint(0, V, (9,)).tolist()
    ids = torch.randint(0, V, (1, 21))
    expected = decoder.generate(prompt, 30, eos_ids=()).tokens
    features = target.forward(ids, taps=(0, 2)).features
    found, wrong = [], []

    def compute() -> None:
        try:
            for _ in range(40):
                same = torch.equal(target.forward(ids, taps=(0, 2)).features, features)
                wrong.extend([] if same else ["features"])
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    while thread.is_alive() and not wrong:
        found.append(decoder.generate(prompt, 30, eos_ids=()).tokens)
    thread.join()
    assert not wrong
    assert found
    assert all(tokens == expected for tokens in found)
