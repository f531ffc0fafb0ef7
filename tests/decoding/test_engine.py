"""A batch gives what each request gives alone (fault kinds 7, 13, 18, 20, 22)."""

import copy
import gc
import random
import weakref
from unittest import mock

import pytest
import torch

from dspark_train.decoding.audit import audit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import (
    BlockProposer,
    CausalProposer,
    LookupProposer,
    PlainProposer,
)
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, warp
from dspark_train.decoding.scheduler import Fixed
from dspark_train.target import Target
from tests.random_drafter import make_drafter

K = 4
SAMPLERS = [
    SamplingSettings(seed=0),
    SamplingSettings(1.0, seed=11),
    SamplingSettings(0.7, top_k=3, seed=12),
    SamplingSettings(1.2, top_p=0.9, seed=13),
    SamplingSettings(1.0, min_p=0.1, seed=14),
]
PROMPTS = [[1, 4, 2, 0, 3], [2], [3, 3, 1, 0, 1, 2, 4, 4, 0], [0, 1], [4, 2, 4, 2, 4]]
LENGTHS = [17, 1, 9, 24, 12]
EOS = [(), (0,), (3,), (), (2, 1)]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, num_layers=3, seed=5)


def proposers(target):
    return {
        "plain": PlainProposer(),
        "lookup": LookupProposer(3, shortest=1),
        "dspark": BlockProposer(make_drafter(target, K, True, "rnn"), target.head),
        "dflash": BlockProposer(make_drafter(target, K, False, None), target.head),
        "model": CausalProposer(smaller_model(target), num_tokens=3),
    }


def smaller_model(target: Target) -> Target:
    """The target itself, with other weights in its last layer."""
    torch.manual_seed(3)
    model = copy.deepcopy(target.model)
    weight = model.model.layers[-1].mlp.down_proj.weight
    weight.data += 0.3 * torch.randn_like(weight)
    return Target.wrap(model, target.tokenizer)


NAMES = ["plain", "lookup", "dspark", "dflash", "model"]


def requests():
    parts = zip(PROMPTS, SAMPLERS, LENGTHS, EOS, strict=True)
    return [Request(*part) for part in parts]


def run(engine: Engine, waiting: list[Request]) -> None:
    while waiting or engine.requests:
        engine.step() if not waiting or not engine.free else engine.add([waiting.pop()])
        engine.take_finished()


def alone(target, name, scheduler=None):
    outputs = []
    for request in requests():
        run(Engine(target, proposers(target)[name], scheduler=scheduler), [request])
        outputs.append((request.new_tokens, request.finish_reason))
    return outputs


class Ragged(Fixed):
    """Verify lengths that differ by request and position; a request's own do not depend on others.

    It drafts nothing in some rounds, and verifies less than it drafts in others.
    """

    def limits(self, requests):
        return [(len(r.tokens) + r.settings.seed) % (K + 1) for r in requests]

    def schedule(self, requests, proposals):
        lengths = [(3 * len(r.tokens) + r.settings.seed) % (K + 1) for r in requests]
        return [min(len(p.tokens), length) for p, length in zip(proposals, lengths, strict=True)]


@pytest.mark.parametrize("scheduler", [None, Fixed(0), Fixed(2), Ragged()])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_gives_the_same_alone_and_in_any_batch(target, name, scheduler):
    """Every sampler, seed, length, stop and proposal length at once; rows refilled in any order."""
    expected = alone(target, name, scheduler)
    assert {reason for _, reason in expected} == {"stop", "length"}
    for rows in (1, 2, 5):
        engine = Engine(target, proposers(target)[name], rows=rows, scheduler=scheduler)
        for seed in range(3):
            batch = requests()
            order = random.Random(seed).sample(batch, len(batch))
            run(engine, order)
            assert [(r.new_tokens, r.finish_reason) for r in batch] == expected


@pytest.mark.parametrize("name", NAMES)
def test_removed_requests_go_on_where_they_were(target, name):
    """Preemption: any request leaves between any rounds and is read again later."""
    expected, chance = alone(target, name), random.Random(1)
    batch = requests()
    engine, waiting = Engine(target, proposers(target)[name], rows=3), list(batch)
    while waiting or engine.requests:
        while waiting and engine.free:
            engine.add([waiting.pop(chance.randrange(len(waiting)))])
            engine.take_finished()
        if engine.requests:
            engine.step()
        engine.take_finished()
        if engine.requests and chance.random() < 0.5:
            waiting.append(chance.choice(engine.requests))
            engine.remove(waiting[-1])
    assert [(r.new_tokens, r.finish_reason) for r in batch] == expected


def test_several_prompts_are_read_in_one_pass(target):
    expected = alone(target, "dspark")
    engine, batch = Engine(target, proposers(target)["dspark"], rows=5), requests()
    engine.add(batch)
    engine.take_finished()
    run(engine, [])
    assert [(r.new_tokens, r.finish_reason) for r in batch] == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_both_caches_is_that_of_a_fresh_engine(target, name):
    """Law 6 for a ragged batch with rows that moved."""
    engine, batch = Engine(target, proposers(target)[name], rows=4, scheduler=Ragged()), requests()
    batch = [Request(r.tokens, r.settings, 30) for r in batch[:4]]
    engine.add(batch[1:])
    engine.add([batch[0]])
    for _ in range(3):
        engine.step()
    engine.remove(engine.requests[0])
    engine.step()
    assert len(set(engine.cache.lengths[: len(engine.requests)])) > 1
    assert audit(engine) < 1e-5


def test_rounds_say_what_entered_the_pass(target):
    engine, batch = (
        Engine(target, proposers(target)["dspark"], rows=3, scheduler=Ragged()),
        requests(),
    )
    engine.add([batch[0], batch[3], batch[2]])
    drafted, proposed = [], []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda rs, ps: (
        drafted.extend(len(p.tokens) for p in ps) or schedule(rs, ps)
    )
    for _ in range(4):
        before = [len(r.tokens) for r in engine.requests]
        rounds = engine.step()
        for r, length, request in zip(rounds, before, engine.requests, strict=True):
            assert r.accepted <= r.judged <= r.proposed <= K
            assert r.committed == len(request.tokens) - length
            assert len(r.confidence or ()) == r.proposed
            proposed.append(r.proposed)
        engine.take_finished()
    assert sum(proposed) < sum(drafted)
    assert 0 in proposed
    assert K in drafted


def test_what_cannot_be_added_or_removed_is_refused(target):
    engine, batch = Engine(target, PlainProposer(), rows=1), requests()
    with pytest.raises(ValueError, match="2 requests for 1 free rows"):
        engine.add(batch[:2])
    with pytest.raises(ValueError, match="not in the batch"):
        engine.remove(batch[0])
    engine.add([batch[1]])
    (finished,) = engine.take_finished()
    with pytest.raises(ValueError, match="length"):
        engine.add([finished])


@pytest.mark.parametrize("name", ["lookup", "dspark"])
def test_traced_requests_tell_the_overlap_of_draft_and_target(target, name):
    """Half the L1 distance of the rows that were verified; 0 or 1 where both are one-hot."""
    engine, batch, expected = Engine(target, proposers(target)[name], rows=4), requests(), []
    batch = [Request(r.tokens, r.settings, 30) for r in batch[1:]]
    for request in batch[:3]:
        request.traced = True
    engine.add(batch)
    real = engine.decide

    def watched(requests, logits, proposals):
        counts = [len(proposal.tokens) + 1 for proposal in proposals]
        for request, proposal, rows in zip(requests, proposals, logits.split(counts), strict=True):
            drawn = proposal.probs
            draft = torch.eye(5)[proposal.tokens] if drawn is None else drawn
            apart = (warp(rows[:-1], request.settings) - draft).abs().sum(-1)
            expected.append((1 - 0.5 * apart).tolist() if request.traced else None)
        return real(requests, logits, proposals)

    with mock.patch.object(engine, "decide", watched):
        found = [r.overlap for _ in range(3) for r in engine.step()]
    for overlap, by_definition in zip(found, expected, strict=True):
        assert overlap == (by_definition and pytest.approx(by_definition, abs=1e-6))
    assert any(0 < x < 1 for overlap in found if overlap for x in overlap)


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_are_read_in_pieces_give_the_same(target, name, chunk):
    """While others go on, and after a preemption too."""
    expected, batch = alone(target, name), requests()
    engine = Engine(target, proposers(target)[name], rows=2, reads_ahead=True)
    waiting, preempted = list(reversed(batch)), 0
    while waiting or engine.requests or engine.reading:
        if engine.reading is None and waiting and engine.free:
            engine.begin(waiting.pop())
        if engine.reading is not None and engine.free:
            engine.read(chunk)
            engine.take_finished()
        if engine.requests:
            engine.step()
            engine.take_finished()
        if preempted < 3 and len(engine.requests) == 2:
            preempted += 1
            waiting.append(engine.requests[0])
            engine.remove(engine.requests[0])
    assert [(r.new_tokens, r.finish_reason) for r in batch] == expected


def test_memory_is_flat_over_a_hundred_requests(target):
    """Fault kind 22: what a row held is used again; nothing is kept of requests that ended."""
    engine = Engine(target, proposers(target)["dspark"], rows=3)
    waiting = [Request(PROMPTS[i % 5], SAMPLERS[i % 5], 6) for i in range(100)]
    ended, sizes = [], set()
    while waiting or engine.requests:
        while waiting and engine.free:
            engine.add([waiting.pop()])
            ended += map(weakref.ref, engine.take_finished())
        if engine.requests:
            engine.step()
        ended += map(weakref.ref, engine.take_finished())
        sizes.add((engine.cache.nbytes, engine.proposer.cache.nbytes))
    gc.collect()
    assert len(ended) == 100
    assert not [request for request in ended if request() is not None]
    assert len(sizes) == 1
