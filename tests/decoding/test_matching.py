"""`verdict="matching"`: exact, and a seed's tokens depend on nothing but the target."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from dspark_train.decoding import verdicts
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import (
    BlockProposer,
    CausalProposer,
    LookupProposer,
    Proposer,
    TreeProposer,
    TreeShape,
)
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows, most_likely
from dspark_train.decoding.scheduler import Fixed
from dspark_train.target import Target
from tests.decoding.test_engine import PROMPTS, SAMPLERS, K, proposers, smaller_model
from tests.random_drafter import make_drafter
from tests.test_exactness import TOLERANCE, greatest_error

LENGTHS = [10, 1, 6, 14, 8]
# one is greedy, one has penalties and bans, which see the drafts before them
MATCHING = [replace(sampler, verdict="matching") for sampler in SAMPLERS]
MATCHING[1] = replace(MATCHING[1], repetition_penalty=1.5, bad_words=((1, 2),), min_tokens=2)


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, num_layers=3, seed=5)


def all_proposers(target: Target) -> dict[str, Proposer]:
    drafter = make_drafter(target, K, True, "vanilla")
    return proposers(target) | {"tree": TreeProposer(TreeShape(9, 3), drafter, target.head)}


def requests(samplers: list[SamplingSettings] = MATCHING) -> list[Request]:
    return [Request(*one) for one in zip(PROMPTS, samplers, LENGTHS, strict=True)]


def alone(engine: Engine, samplers: list[SamplingSettings] = MATCHING) -> list[list[int]]:
    """New tokens of every request, one after the other."""
    asked = requests(samplers)
    for request in asked:
        engine.add([request])
        while request.finish_reason is None:
            engine.step()
        engine.take_finished()
    return [request.new_tokens for request in asked]


def test_a_seed_gives_the_same_tokens_with_every_proposer_and_verify_length(target):
    found = all_proposers(target)
    expected = alone(Engine(target, found["plain"]))
    assert [len(tokens) for tokens in expected] == LENGTHS
    by_rejection = set()
    for name, proposer in found.items():
        for length in range(K + 1) if name == "dspark" else (1, None):
            engine = Engine(target, proposer, scheduler=Fixed(length))
            assert alone(engine) == expected, (name, length)
    for length in (0, K):  # the other verdict cannot do that
        engine = Engine(target, found["dspark"], scheduler=Fixed(length))
        by_rejection.add(str(alone(engine, SAMPLERS)))
    assert len(by_rejection) == 2


def test_a_seed_gives_the_same_tokens_in_batches_and_after_preemption(target):
    found = all_proposers(target)
    expected = alone(Engine(target, found["plain"]))
    for proposer in found.values():
        engine, asked = Engine(target, proposer, rows=5), requests()
        mixed = Request([1, 2], SAMPLERS[2], 5)  # judged by rejection, in the same batch
        engine.add([*asked[:4], mixed])
        waiting = [asked[4]]
        for _ in range(2):
            engine.take_finished()
            engine.step()
        engine.take_finished()
        preempted = engine.requests[0]
        engine.remove(preempted)
        waiting.insert(0, preempted)
        while waiting or engine.requests:
            if waiting and engine.free:
                engine.add([waiting.pop()])
            elif engine.requests:
                engine.step()
            engine.take_finished()
        assert [request.new_tokens for request in asked] == expected


SETTINGS = SamplingSettings(1.0, top_k=3, verdict="matching")


@pytest.fixture
def exact_engines(random_target):
    target = random_target(vocab_size=4, num_layers=2)
    return [
        Engine(target, BlockProposer(make_drafter(target, 2), target.head, 4), 4),
        Engine(target, CausalProposer(smaller_model(target), 4, num_tokens=2), 4),
        Engine(target, LookupProposer(2, shortest=1), 4),
        Engine(target, TreeProposer(TreeShape(4, 2), make_drafter(target, 2), target.head, 4), 4),
    ]


def test_the_output_distribution_is_the_targets(exact_engines):
    for engine in exact_engines:
        assert greatest_error(engine, SETTINGS, length=3) < TOLERANCE


def test_a_token_that_is_drawn_again_after_a_mismatch_is_found(exact_engines):
    """Of two draws the second: so a draft gets too much mass."""
    lawful = verdicts.matching

    def again(request, raw, rows, proposal):
        accepted, token, traced = lawful(request, raw, rows, proposal)
        if accepted < len(proposal.tokens):
            place = len(request.tokens) + accepted
            number = request.randomness.uniform(place, "resample")
            (token,) = verdicts.draw_rows(rows[accepted : accepted + 1], [number]).tolist()
        return accepted, token, traced

    with mock.patch.object(verdicts, "matching", again):
        assert greatest_error(exact_engines[0], SETTINGS, length=3) > 0.01


def test_most_likely_drafts_match_more_often_than_drawn_ones():
    """The mean of target_probs over drafts, where the drafter is near the target."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(2000, 50)
    near = logits + 0.7 * torch.randn_like(logits)
    target_probs, draft_probs = logits.softmax(-1), near.softmax(-1)
    drawn = draw_rows(draft_probs, torch.rand(2000).tolist())[:, None]
    of_drawn = target_probs.gather(1, drawn).mean()
    of_likely = target_probs.gather(1, most_likely(near)[:, None]).mean()
    assert of_likely > 1.3 * of_drawn


def test_unknown_verdicts_are_refused():
    with pytest.raises(ValueError, match="verdict='exact', expected one of"):
        SamplingSettings(verdict="exact")
