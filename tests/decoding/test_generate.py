"""The decoder as users call it (fault kinds 4, 13-16, 22)."""

import pytest
import torch

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.proposers import LookupProposer, PlainProposer
from dspark_train.target import Target
from tests.random_drafter import make_drafter

K = 4
PROMPT = [1, 4, 2, 0, 3]
SAMPLERS = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "top_k": 3, "seed": 1}]


def decoders(target: Target) -> dict[str, SpeculativeDecoder]:
    made = {"plain": SpeculativeDecoder(target, PlainProposer())}
    made["lookup"] = SpeculativeDecoder(target, LookupProposer(shortest=1))
    for name, (anchored, head) in {
        "dspark-vanilla": (True, "vanilla"),
        "dspark-rnn": (True, "rnn"),
        "dflash": (False, None),
    }.items():
        drafter = make_drafter(target, K, anchored, head)
        made[name] = SpeculativeDecoder.with_drafter(target, drafter)
    drafter = make_drafter(target, K, True, "gated")
    made["no-heads"] = SpeculativeDecoder.with_drafter(target, drafter, use_heads=False)
    return made


NAMES = ["plain", "lookup", "dspark-vanilla", "dspark-rnn", "dflash", "no-heads"]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, num_layers=3, seed=5)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_the_bare_model_token_by_token(target, name):
    ids = torch.tensor([PROMPT])
    for _ in range(40):
        logits = target.model(input_ids=ids).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    result = decoders(target)[name].generate(PROMPT, 40)
    assert result.tokens == ids[0, len(PROMPT) :].tolist()
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_length_from_one_to_past_a_block_is_exact(target, name, sampler):
    """Fault kind 14: 1…K+2 new tokens; a shorter run is the beginning of a longer one."""
    decoder = decoders(target)[name]
    for count in range(1, K + 3):
        result = decoder.generate(PROMPT, count, **sampler)
        assert len(result.tokens) == count == result.stats.tokens
        assert result.finish_reason == "length"
        assert result.stats.committed == count - 1


def test_the_context_ends_the_output(random_target):
    """Fault kind 14: with one position left, one token comes."""
    for decoder in decoders(random_target(max_position_embeddings=12)).values():
        for length in (9, 10, 11):
            result = decoder.generate([1] * length, 50, temperature=1.0)
            assert (len(result.tokens), result.finish_reason) == (12 - length, "length")
        for length in (12, 13):
            with pytest.raises(ValueError, match=f"{length} tokens and the context .* 12"):
                decoder.generate([1] * length)


@pytest.mark.parametrize("name", NAMES)
def test_any_of_several_eos_ids_ends_the_output(target, name):
    """Fault kinds 15, 16: text, ids and counts end at the EOS, wherever in a block it is."""
    decoder = decoders(target)[name]
    free = decoder.generate(PROMPT, 30).tokens
    for eos_ids in ((0,), (3,), (0, 3), (1, 2)):
        result = decoder.generate(PROMPT, 30, eos_ids=eos_ids)
        end = next(i for i, token in enumerate(free) if token in eos_ids) + 1
        assert result.tokens == free[:end]
        assert result.finish_reason == "stop"
        assert result.stats.tokens == end
        assert result.text == target.tokenizer.decode(free[: end - 1])


def test_no_eos_configured_works(target):
    assert target.eos_ids == ()
    assert len(SpeculativeDecoder(target, PlainProposer()).generate(PROMPT, 3).tokens) == 3


def test_the_targets_own_eos_is_the_default(tiny_target):
    prompt = [{"role": "user", "content": "please open the red door"}]
    decoder = SpeculativeDecoder(tiny_target, LookupProposer())
    result = decoder.generate(prompt, 60)
    assert result.finish_reason == "stop"
    assert result.tokens[-1] == tiny_target.tokenizer.eos_token_id
    assert "open the red door" in result.text
    assert "<|im_end|>" not in result.text
    ids = tiny_target.encode_chat(prompt)
    assert decoder.generate(ids, 60).tokens == result.tokens
    assert result.prompt_tokens == len(ids)
    text = tiny_target.tokenizer.decode(ids)
    assert decoder.generate(text, 60).tokens == result.tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_across_tokens_and_blocks_ends_the_output(target, name):
    decoder = decoders(target)[name]
    free = decoder.generate(PROMPT, 30)
    words = free.text.split()
    for start in range(8):
        stop = " ".join(words[start : start + 3])
        result = decoder.generate(PROMPT, 30, stop=["nowhere", stop])
        assert result.text == free.text[: free.text.index(stop)]
        # the tokens end with the one that completes the stop string
        assert stop in target.tokenizer.decode(result.tokens)
        assert stop not in target.tokenizer.decode(result.tokens[:-1])
        assert result.finish_reason == "stop"
        assert result.stats.tokens == len(result.tokens)
        streamed = decoder.stream(PROMPT, 30, stop=stop)
        assert "".join(streamed) == result.text


@pytest.mark.parametrize("name", NAMES)
def test_seeds_repeat_and_requests_do_not_disturb_each_other(target, name):
    """Fault kind 13."""
    decoder = decoders(target)[name]
    first = decoder.generate(PROMPT, 20, temperature=1.0, seed=4).tokens
    decoder.generate([2, 2], 7, temperature=1.0)
    assert decoder.generate(PROMPT, 20, temperature=1.0, seed=4).tokens == first
    assert decoder.generate(PROMPT, 20, temperature=1.0, seed=5).tokens != first
    unseeded = {tuple(decoder.generate(PROMPT, 20, temperature=1.0).tokens) for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stream_gives_the_text_in_pieces_and_then_the_result(target, sampler):
    for decoder in decoders(target).values():
        stream = decoder.stream(PROMPT, 12, **sampler)
        assert stream.result is None
        pieces = list(stream)
        whole = decoder.generate(PROMPT, 12, **sampler)
        assert "".join(pieces) == stream.result.text == whole.text
        assert len(pieces) > 1
        assert stream.result.tokens == whole.tokens


def test_a_stream_that_is_left_does_not_harm_the_next_request(target):
    decoder = decoders(target)["dspark-rnn"]
    whole = decoder.generate(PROMPT, 12).tokens
    for _ in decoder.stream([2, 2, 2], 12):
        break
    assert decoder.generate(PROMPT, 12).tokens == whole
    left = iter(decoder.stream([2, 2, 2], 12))
    next(left)
    both = decoder.run([decoder.request(PROMPT, 12), decoder.request([2, 2], 12)])
    assert both[0].tokens == whole
    with pytest.raises(RuntimeError, match="another request has begun"):
        list(left)


def test_rounds_are_traced_with_confidences_and_sum_to_the_statistics(target):
    rounds = []
    decoder = decoders(target)["dspark-vanilla"]
    stats = decoder.generate(PROMPT, 25, trace=rounds.append).stats
    assert len(rounds) == stats.rounds
    assert sum(r.committed for r in rounds) == stats.committed == 24
    assert all(len(r.confidence) == r.proposed for r in rounds if r.proposed)
    assert all(r.accepted <= r.judged <= r.proposed for r in rounds)
    assert stats.tau == 24 / len(rounds)
    assert min(stats.seconds.values()) > 0


def test_padding_of_the_vocabulary_is_never_emitted(tiny_target):
    """Fault kind 6: at a high temperature most mass would lie on rows without a token."""
    decoder = SpeculativeDecoder(tiny_target, PlainProposer())
    tokens = decoder.generate([5, 6], 100, temperature=50.0, seed=0, eos_ids=()).tokens
    assert max(tokens) < len(tiny_target.tokenizer) < tiny_target.vocab_size


def test_a_target_without_a_tokenizer_takes_and_gives_ids(target):
    bare = Target.wrap(target.model)
    decoder = SpeculativeDecoder(bare, PlainProposer())
    result = decoder.generate(PROMPT, 4)
    assert (len(result.tokens), result.text) == (4, "")
    for call in (
        lambda: decoder.generate("t1 t2", 4),
        lambda: decoder.generate(PROMPT, 4, stop="t1"),
        lambda: decoder.stream(PROMPT, 4),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([1, 5], {}, "token id 5 .* 0 to 4"),
        ([-1], {}, "token id -1"),
        (None, {}, "prompt=None, expected text"),
        (5, {}, "prompt=5, expected text"),
        (["a", "b"], {}, "expected text, a list of messages, or token ids"),
        ({"role": "user", "content": "hi"}, {}, "a list of messages"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"max_new_tokens": None}, "max_new_tokens=None"),
        ([1], {"temperature": -0.1}, "temperature=-0.1"),
        ([1], {"stop": [""]}, "stop"),
        ([{"role": "user", "content": "hi"}], {}, "no chat template"),
    ],
)
def test_bad_requests_are_refused_by_name(target, prompt, options, message):
    decoder = SpeculativeDecoder(target, PlainProposer())
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompt, **options)


def test_bad_lists_of_requests_are_refused(target) -> None:
    decoder = SpeculativeDecoder(target, PlainProposer())
    request = decoder.request([1, 2], 3)
    for given, rows, message in [
        ([request], 0, "rows=0"),
        ([request, request], 2, r"requests\[1\] is in the list already"),
        (["hello"], 2, r"requests\[0\] is 'hello'"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.run(given, rows=rows)
    assert len(decoder.run([request])[0].tokens) == 3
    with pytest.raises(ValueError, match=r"requests\[0\] has run already"):
        decoder.run([request])
