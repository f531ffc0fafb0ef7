"""Targets with recurrent states: what every pattern of acceptance leaves is a fresh reading's."""

import itertools

import pytest
import torch

from dspark_train.decoding.audit import audit
from dspark_train.decoding.cache_state import StateLayer
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import (
    CausalProposer,
    PlainProposer,
    Proposal,
    TreeProposer,
    TreeShape,
)
from dspark_train.decoding.proposers.base import Stateless
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target
from tests import families
from tests.random_drafter import make_drafter

K, V = 3, 23
REFUSED = ("jamba", "minimax")
FAMILIES = ["qwen3_next", "bamba", "lfm2", *sorted(families.RECURRENT.keys() - {*REFUSED})]
PROMPTS = [[5, 6, 7, 8, 5], [1, 2], list(range(3, 12))]
# float32: chunks and single steps of a recurrence round differently
ROUNDING, FAULT = 2e-4, 1e-2


class Scripted(Stateless):
    """Proposes K drafts, of which `script[row].pop(0)` are the target's own."""

    def __init__(self, truths: dict[int, list[int]], scripts: dict[int, list[int]]) -> None:
        self.truths, self.scripts = truths, scripts

    def propose(self, requests, limits):
        proposals = []
        for request, limit in zip(requests, limits, strict=True):
            script = self.scripts[request.prompt_length]
            right = script.pop(0) if script else 0
            start = len(request.tokens)
            drafts = self.truths[request.prompt_length][start : start + K]
            drafts[right:] = [(token + 1) % V for token in drafts[right:]]
            proposals.append(Proposal(drafts[:limit]))
        return proposals


def plain(target: Target, prompt: list[int], count: int) -> list[int]:
    """Prompt and greedy continuation by transformers itself."""
    ids = torch.tensor([prompt])
    return target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
    )[0].tolist()


def run(
    target: Target, truths: list[list[int]], scripts: list[list[int]], count: int
) -> tuple[list[Request], float]:
    """Requests for `truths` after their scripts, and the worst that an audit found."""
    prompts = PROMPTS[: len(truths)]
    by_prompt = {len(p): t for p, t in zip(prompts, truths, strict=True)}
    script = {len(p): list(s) for p, s in zip(prompts, scripts, strict=True)}
    engine = Engine(target, Scripted(by_prompt, script), rows=len(prompts))
    requests = [Request(p, SamplingSettings(), count) for p in prompts]
    engine.add(requests)
    worst = audit(engine)
    while engine.requests:
        engine.step()
        worst = max(worst, audit(engine))
        engine.take_finished()
    return requests, worst


@pytest.fixture(scope="module")
def hybrid() -> tuple[Target, list[list[int]]]:
    target = Target.wrap(families.make("bamba", V))
    return target, [plain(target, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_acceptance_in_ragged_batches(family):
    """Three rows of unequal prompts and acceptance, some of which end before others."""
    target = Target.wrap(families.make(family, V))
    assert target.recurrent
    truths = [plain(target, prompt, 8) for prompt in PROMPTS]
    assert all(len(set(truth[-8:])) > 2 for truth in truths)
    requests, worst = run(target, truths, [[0, 2, 1], [3, 1, 0], [1, 0, 3]], 8)
    assert [request.tokens for request in requests] == truths
    assert worst < ROUNDING


@pytest.mark.parametrize("pattern", itertools.product(range(K + 1), repeat=2))
def test_every_acceptance_pattern_of_one_request(hybrid, pattern):
    target, truths = hybrid
    (request,), worst = run(target, truths[:1], [list(pattern)], 8)
    assert request.tokens == truths[0]
    assert worst < ROUNDING


@pytest.mark.parametrize("fault", ["kept", "not read again"])
def test_a_state_that_is_not_put_back_is_found(hybrid, monkeypatch, fault):
    target, truths = hybrid
    restore = StateLayer._restore
    wrong = {
        "kept": lambda *_: None,
        "not read again": lambda self, rows, _: restore(self, rows, 0),
    }
    monkeypatch.setattr(StateLayer, "_restore", wrong[fault])
    (request,), worst = run(target, truths[:1], [[1, 1]], 8)
    assert worst > FAULT
    assert request.tokens != truths[0]


def test_a_prompt_in_pieces_and_a_row_that_moves(hybrid):
    target, truths = hybrid
    engine = Engine(target, PlainProposer(), rows=2, reads_ahead=True)
    first, second = (Request(prompt, SamplingSettings(), 8) for prompt in PROMPTS[::2])
    engine.add([first])
    engine.begin(second)
    while not engine.read(4):
        engine.step()
    engine.remove(first)
    while second.finish_reason is None:
        engine.step()
    assert audit(engine) < ROUNDING
    assert second.tokens == truths[2]


def test_what_a_state_cannot_do_is_refused(hybrid):
    target, _ = hybrid
    engine = Engine(target, PlainProposer())
    engine.add([Request(PROMPTS[0], SamplingSettings(), 8)])
    engine.step()
    with pytest.raises(ValueError, match="over the 0 positions of the last pass"):
        engine.cache.truncate([2])
    engine.cache.truncate([0])  # nothing is a state too
    with pytest.raises(ValueError, match="keeps a recurrent state"):
        CausalProposer(target)
    trees = TreeProposer(TreeShape(4, 2), make_drafter(target, K), target.head)
    with pytest.raises(ValueError, match=r"recurrent state.*decode without trees"):
        Engine(target, trees)


@pytest.mark.parametrize(
    ("family", "message"),
    zip(REFUSED, ("one at a time and several at once", "way of its own"), strict=True),
)
def test_states_that_cannot_be_put_back_are_refused_by_name(family, message):
    with pytest.raises(ValueError, match=message):
        Target.wrap(families.make(family, V))
