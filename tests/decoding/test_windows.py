"""Targets with sliding windows: prefill, rounds and rollbacks across the edge (fault kind 19)."""

import itertools

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.audit import audit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import CausalProposer, LookupProposer, PlainProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target
from tests.random_drafter import make_drafter

WINDOW = 6
SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"use_sliding_window": True, **MIXED}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, MIXED),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, MIXED),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, MIXED),
}
COUNT = 16
PROMPTS = [[1, 4, 2, 0, 3], [2], [3, 7, 1, 0, 1, 2, 4, 9, 0, 8, 5]]


CASES = [*itertools.product(("mistral", "qwen3", "gemma3", "olmo3"), ("sdpa",))]
CASES += [("gemma2", "eager"), ("qwen3", "eager")]


@pytest.fixture(params=CASES, ids="-".join)
def target(request) -> Target:
    return make_target(*request.param)


def make_target(family: str, attention: str) -> Target:
    """A random model of the family, with short windows."""
    model, config, more = FAMILIES[family]
    torch.manual_seed(0)
    config = config(**SMALL, **more)
    config._attn_implementation = attention
    return Target.wrap(model(config))


def bare(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy by whole passes without a cache: the family's own masks."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        logits = target.model(input_ids=ids, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()


def test_every_proposer_gives_the_bare_models_tokens(target):
    """The drafts of a random drafter fall nearly always: a rollback in nearly every round."""
    assert target.sliding_window == WINDOW
    expected = [bare(target, prompt, COUNT) for prompt in PROMPTS]
    decoders = [
        SpeculativeDecoder(target, PlainProposer()),
        SpeculativeDecoder(target, LookupProposer(shortest=1)),
        SpeculativeDecoder(target, CausalProposer(target, num_tokens=3)),
        SpeculativeDecoder.with_drafter(target, make_drafter(target, 4)),
    ]
    for decoder in decoders:
        results = decoder.run([decoder.request(prompt, COUNT) for prompt in PROMPTS], rows=3)
        assert [result.tokens for result in results] == expected
        assert [decoder.generate(prompt, COUNT).tokens for prompt in PROMPTS] == expected


def test_caches_are_fresh_after_rollbacks_across_the_edge(target):
    """Every length from below to beyond the window, three rows that are not alike."""
    proposer = CausalProposer(target, num_tokens=3, sampler=SamplingSettings(3.0))
    engine = Engine(target, proposer, rows=3)
    engine.add([Request(prompt, SamplingSettings(1.0, seed=1), COUNT) for prompt in PROMPTS])
    rounds = []
    while not engine.take_finished():
        rounds += engine.step()
        assert audit(engine) < 1e-5
    assert {0, 1} <= {r.accepted for r in rounds}


def test_the_window_matters(target):
    """The same weights without it say something else, so the tests above see the mask."""
    with_window = [bare(target, prompt, COUNT) for prompt in PROMPTS]
    config = target.model.config
    config.sliding_window = 128
    for layer in target.model.model.layers:
        layer.self_attn.sliding_window = 128
    assert [bare(target, prompt, COUNT) for prompt in PROMPTS] != with_window
