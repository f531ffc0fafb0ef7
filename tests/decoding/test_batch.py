"""Batched plain sampling: the same tokens as single requests, whatever shares the pass."""

import pytest

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.batch import generate_batch
from dspark_train.decoding.proposers import PlainProposer
from dspark_train.decoding.sampling import SamplingSettings

PROMPTS = [[1, 2, 3], [4], [0, 1, 2, 3, 4, 0, 1], [2, 2], [3] * 11, [1, 2, 3], [0, 4, 0]]
SEEDS = [5, 1, 2, 3, 4, 6, 2**40]
SAMPLERS = [
    SamplingSettings(),
    SamplingSettings(1.0),
    SamplingSettings(0.7, top_p=0.9),
    SamplingSettings(1.2, top_k=3, min_p=0.05),
]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, seed=5)


def batch(target, settings=SAMPLERS[1], **options):
    defaults = {"slots": 3, "max_new_tokens": 12, "eos_ids": (0,), "seeds": SEEDS}
    return generate_batch(target, PROMPTS, settings, **(defaults | options))


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
@pytest.mark.parametrize("settings", SAMPLERS)
def test_outputs_equal_single_requests(target, settings, slots):
    decoder = SpeculativeDecoder(target, PlainProposer())
    for prompt, seed, output in zip(
        PROMPTS, SEEDS, batch(target, settings, slots=slots), strict=True
    ):
        single = decoder.generate(
            prompt,
            12,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=seed,
            eos_ids=(0,),
        )
        assert output == (single.tokens, single.finish_reason)


def test_reasons_and_lengths(target):
    outputs = batch(target)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for tokens, reason in outputs:
        assert (tokens[-1] == 0) if reason == "stop" else (len(tokens) == 12)
        assert 0 not in tokens[:-1]
    assert all(len(tokens) == 12 for tokens, _ in batch(target, eos_ids=()))


def test_the_same_inputs_give_the_same_outputs(target):
    assert batch(target) == batch(target)
    assert batch(target) != batch(target, seeds=[seed + 1 for seed in SEEDS])


def test_progress_sees_every_prompt_once(target):
    seen = {}
    outputs = batch(target, progress=lambda index, output: seen.setdefault(index, output))
    assert [seen[index] for index in range(len(PROMPTS))] == outputs


def test_one_new_token_and_the_end_of_the_context(random_target):
    target = random_target(max_position_embeddings=12)
    assert [len(tokens) for tokens, _ in batch(target, max_new_tokens=1)] == [1] * 7
    outputs = batch(target, max_new_tokens=50, eos_ids=())
    assert [len(tokens) for tokens, _ in outputs] == [12 - len(p) for p in PROMPTS]


def test_nothing_to_do_gives_nothing(target):
    settings = SamplingSettings(1.0)
    assert (
        generate_batch(target, [], settings, slots=4, max_new_tokens=3, eos_ids=(), seeds=[]) == []
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1]}, "7 prompts but 1 seeds"),
        ({"slots": 0}, "slots=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_input_is_refused(target, options, message):
    with pytest.raises(ValueError, match=message):
        batch(target, **options)


@pytest.mark.parametrize("prompt", [[], [1] * 64])
def test_a_prompt_that_does_not_fit_is_refused_by_number(target, prompt):
    with pytest.raises(ValueError, match=f"prompt 1 has {len(prompt)} tokens, expected 1 to 63"):
        generate_batch(
            target,
            [[1], prompt],
            SamplingSettings(),
            slots=2,
            max_new_tokens=2,
            eos_ids=(),
            seeds=[0, 1],
        )
