"""Processors, log-probabilities and transformers' config, as users call them (fault 11, 12, 17)."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
)

from dspark_train.decoding import SpeculativeDecoder, from_generation_config
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.processors import process
from dspark_train.decoding.proposers import LookupProposer, PlainProposer
from dspark_train.decoding.request import Request, RequestError
from dspark_train.decoding.sampling import SamplingSettings, warp
from tests.random_drafter import make_drafter

PROMPT = [1, 4, 2, 0, 3]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, num_layers=3, seed=5)


@pytest.fixture
def decoders(target):
    return {
        "plain": SpeculativeDecoder(target, PlainProposer()),
        "lookup": SpeculativeDecoder(target, LookupProposer(shortest=1)),
        "drafter": SpeculativeDecoder.with_drafter(target, make_drafter(target, 4)),
    }


NAMES = ["plain", "lookup", "drafter"]


class Counting:
    """Counts its calls and the rows that they were for."""

    def __init__(self, prefix_free: bool) -> None:
        self.prefix_free, self.calls = prefix_free, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append((input_ids.tolist(), len(scores)))
        return scores


def test_prefix_free_processors_run_once_and_others_see_the_drafts_in_order():
    free, bound = Counting(True), Counting(False)
    logits = torch.randn(3, 5)
    assert torch.equal(process(logits, [free, bound], [7, 8], [1, 2]), logits)
    assert [rows for _, rows in free.calls] == [3]
    assert bound.calls == [([[7, 8]], 1), ([[7, 8, 1]], 1), ([[7, 8, 1, 2]], 1)]
    known = SuppressTokensLogitsProcessor([2])
    assert process(logits, [known], [7], [1, 2])[:, 2].tolist() == [-float("inf")] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.4},
        {"bad_words_ids": [[2], [0, 1]], "no_repeat_ngram_size": 3},
        {"suppress_tokens": [4], "begin_suppress_tokens": [0, 1], "min_new_tokens": 9},
        {"sequence_bias": {(1,): -3.0}, "max_new_tokens": 20},
    ],
)
def test_greedy_equals_generate_of_transformers(target, decoders, name, config):
    config = {"max_new_tokens": 24, "eos_token_id": 3, **config}
    config = GenerationConfig(do_sample=False, pad_token_id=0, **config)
    ids = torch.tensor([PROMPT])
    theirs = target.model.generate(ids, config, attention_mask=torch.ones_like(ids))[0]
    ours = decoders[name].generate(PROMPT, **from_generation_config(config))
    assert ours.tokens == theirs[len(PROMPT) :].tolist()


def test_a_sampling_config_is_read_and_unsupported_fields_are_named():
    config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9)
    assert from_generation_config(config) == {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    for wrong in (
        {"num_beams": 4},
        {"num_return_sequences": 2},
        {"epsilon_cutoff": 0.1},
        {"guidance_scale": 1.5},
        {"max_time": 1.0},
        {"prompt_lookup_num_tokens": 4},
        {"sequence_bias": {(1, 2): 1.0}},
    ):
        (name,) = wrong
        with pytest.raises(ValueError, match=name):
            from_generation_config(GenerationConfig(**wrong))


def test_warpers_in_a_users_list_are_the_same_as_settings(decoders):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.6)])
    one = decoders["drafter"].generate(PROMPT, 20, temperature=1.0, seed=2, processors=warpers)
    assert one.tokens == decoders["drafter"].generate(PROMPT, 20, temperature=0.6, seed=2).tokens


def test_processors_that_keep_state_are_refused(decoders):
    watermark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=2, keys=[1], sampling_table_size=2, sampling_table_seed=0, context_history_size=4,
        device="cpu",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"SynthIDText.* is not supported"):
        decoders["plain"].generate(PROMPT, 3, processors=[watermark])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}])
def test_logprobs_are_those_of_the_bare_model(target, decoders, name, settings):
    result = decoders[name].generate(PROMPT, 12, logprobs=2, **settings)
    assert [one.token for one in result.logprobs] == result.tokens
    ids = torch.tensor([PROMPT + result.tokens])
    logits = target.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    own = logits.log_softmax(-1)
    sampled = warp(logits, SamplingSettings(**settings)).log()
    for i, one in enumerate(result.logprobs):
        assert one.logprob == pytest.approx(own[i, one.token].item(), abs=1e-4)
        assert one.sampled_logprob == pytest.approx(sampled[i, one.token].item(), abs=1e-4)
        best = own[i].topk(2)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_end_with_the_tokens(decoders, name):
    """Fault kind 16: an EOS or a stop string inside a block ends all of them."""
    free = decoders[name].generate(PROMPT, 30).tokens
    for options in ({"eos_ids": [free[5]]}, {"stop": f"t{free[6]}"}):
        result = decoders[name].generate(PROMPT, 30, logprobs=0, **options)
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == len(result.tokens) == result.stats.tokens
        assert result.logprobs[0].top == []
    assert decoders[name].generate(PROMPT, 3).logprobs is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"typical_p": 0.0}, "typical_p=0.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty=inf"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": {9: 1.0}}, "token id 9 in the sampling settings"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[1, 7]]}, "token id 7"),
        ({"allowed_tokens": []}, "allowed_tokens is empty"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"suppress_at_begin": [-2]}, "token id -2"),
        ({"logprobs": 6}, "logprobs=6"),
        ({"top_q": 0.5}, "top_q"),
    ],
)
def test_settings_out_of_range_are_refused(decoders, options, message):
    """Fault kind 11: nothing is ignored."""
    with pytest.raises(ValueError, match=message):
        decoders["plain"].generate(PROMPT, 3, **options)


class Fails:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPT) + 6:
            raise KeyError("a user's own mistake")
        return scores


@pytest.mark.parametrize(
    "poison",
    [
        SamplingSettings(1.0, processors=[Fails()]),
        SamplingSettings(0.0, allowed_tokens=[1], bad_words=[[1, 1, 1]]),
        SamplingSettings(1.0, allowed_tokens=[1], bad_words=[[1, 1, 1]]),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_fails_does_not_take_others_down(decoders, name, poison):
    """The round that failed is run again without it, and the others end as they do alone."""
    decoder, settings = decoders[name], SamplingSettings(0.9, seed=3)
    alone = decoder.generate(PROMPT, 20, temperature=0.9, seed=3).tokens
    healthy = [Request(PROMPT, settings, 20) for _ in range(2)]
    engine = Engine(decoder.target, decoder.proposer, decoder.vocabulary, rows=3)
    poisoned = Request(PROMPT, poison, 20)
    engine.add([healthy[0], poisoned, healthy[1]])
    failed = []
    while engine.requests:
        try:
            engine.step()
        except RequestError as error:
            failed.append(error.request)
            engine.remove(error.request)
        engine.take_finished()
    assert failed == [poisoned]
    assert [request.new_tokens for request in healthy] == [alone, alone]
    with pytest.raises(RequestError, match="leave no token"):
        engine.add([Request(PROMPT, SamplingSettings(allowed_tokens=[1], bad_words=[[1]]), 3)])
    assert not engine.requests


def test_many_requests_with_settings_of_their_own(decoders):
    decoder = decoders["drafter"]
    options = [
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.3},
        {"logprobs": 1},
        {"temperature": 1.0, "seed": 2, "bad_words": [[2, 1]], "stop": "t4"},
        {"temperature": 1.3, "seed": 3, "top_k": 2, "max_new_tokens": 3},
    ]
    alone = [decoder.generate(PROMPT, **{"max_new_tokens": 15, **one}) for one in options]
    requests = [decoder.request(PROMPT, **{"max_new_tokens": 15, **one}) for one in options]
    together = decoder.run(requests, rows=3)
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        assert ours.finish_reason == theirs.finish_reason
        assert ours.stats.rounds == theirs.stats.rounds
    assert decoder.run([]) == []
    assert decoder.generate(PROMPT, 15, **options[0]).tokens == alone[0].tokens
