"""Drafting as one piece of recorded work, walk and draws included: the same drafts."""

from unittest import mock

import pytest
import torch

from dspark_train.decoding import compiling
from dspark_train.decoding.compiling import compiled
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.proposers.drawing import Drawing, FixedDrawing
from dspark_train.decoding.recording import Recorder
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows
from tests.decoding.tape import taped
from tests.random_drafter import make_drafter

PROMPTS = [[1, 2, 3], [4], [0, 0, 1, 2, 3, 3, 1]]
SAMPLERS = {
    "greedy": [{}, {}, {}],
    "sampled": [{"temperature": 0.8}, {"temperature": 0.8}, {"temperature": 0.8}],
    "mixed": [{}, {"temperature": 0.8}, {"temperature": 1.5}],
    "a verdict that wants the most likely": [{"temperature": 0.8, "verdict": "matching"}] * 3,
    "a filter": [{"temperature": 0.8, "top_p": 0.7}, {}, {"temperature": 1.0}],
    "a processor": [{"presence_penalty": 0.5}, {}, {"temperature": 1.0}],
}
DRAFTERS = {
    "vanilla": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "no head": {"head": None, "sample_from_anchor": False},
    "selector": {"head": "selector", "selector_top_k": 3},
    "few tokens": {"draft_ids": [0, 2, 3]},
}


@pytest.fixture(autouse=True)
def recorded():
    """What CUDA would record is recorded."""
    with mock.patch.object(Recorder, "_capture", lambda self, work: taped(work)):
        yield


def proposals(target, drafter, samplers, limits, recorder=None):
    """Of a round of requests, and the proposer."""
    proposer = BlockProposer(drafter, target.head, recorder=recorder)
    proposer.open(4)
    requests = [
        Request(prompt, SamplingSettings(seed=i, **given), 20)
        for i, (prompt, given) in enumerate(zip(PROMPTS, samplers, strict=True))
    ]
    for row, request in enumerate(requests):
        ids = torch.tensor([request.tokens[:-1] or [0]])
        features = target.forward(ids, taps=proposer.taps).features
        proposer.start(row)
        proposer.observe(row, [request], features, [len(request.tokens) - 1])
    return proposer.propose(requests, limits), proposer


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_the_same_drafts_from_the_same_distributions(random_target, kind, sampler) -> None:
    target = random_target()
    drafter = make_drafter(target, 5, **DRAFTERS[kind])
    limits = [3, 0, 2]
    expected, _ = proposals(target, drafter, SAMPLERS[sampler], limits)
    recorder = Recorder(target.device)
    found, proposer = proposals(target, drafter, SAMPLERS[sampler], limits, recorder)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert (one.probs is None) == (other.probs is None)
        assert (one.confidence is None) == (other.confidence is None)
        if one.probs is not None:
            torch.testing.assert_close(one.probs, other.probs)
        if one.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence)
    # filters and processors read on the host: their walk is not recorded
    by_hand = sampler in ("a filter", "a processor")
    assert (proposer.walked > 0) == by_hand
    assert [slots for _, _, slots, _ in recorder.recorded] == [0 if by_hand else 3]


@torch.inference_mode()
def test_one_shape_serves_every_temperature_and_number(random_target) -> None:
    target = random_target()
    drafter, recorder, drawn = make_drafter(target, 5), Recorder(target.device), set()
    _, plain = proposals(target, drafter, SAMPLERS["sampled"], [5] * 3)
    _, proposer = proposals(target, drafter, SAMPLERS["sampled"], [5] * 3, recorder)
    for seed in range(12):
        requests = [
            Request(prompt, SamplingSettings(0.5 + i, seed=seed), 20)
            for i, prompt in enumerate(PROMPTS)
        ]
        found, expected = (one.propose(requests, [5] * 3) for one in (proposer, plain))
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens
            torch.testing.assert_close(one.probs, other.probs)
            drawn.add(tuple(one.tokens))
    assert len(recorder.recorded) == 1
    assert len(drawn) > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drawing_without_the_host_is_drawing(temperature) -> None:
    torch.manual_seed(0)
    requests = [Request([1], SamplingSettings(temperature, seed=i), 9) for i in range(40)]
    drawing, logits = Drawing(requests, None), 3 * torch.randn(3, 40, 700)
    draws = None, None
    if temperature:
        draws = torch.full((40,), temperature), drawing.uniforms(3)
        one_by_one = [[request.proposing(slot) for slot in range(3)] for request in requests]
        assert draws[1].tolist() == one_by_one
    fixed = FixedDrawing(None, *draws)
    for of_slot in logits:
        assert torch.equal(drawing.next(of_slot), fixed.next(of_slot))
    tokens, probs = fixed.all()
    taken = Drawing(requests, None)
    taken.take(tokens, probs)
    for one, other in zip(taken.proposals([2] * 40), drawing.proposals([2] * 40), strict=True):
        assert one.tokens == other.tokens
        assert (one.probs is None) == (temperature == 0)
        assert one.probs is None or torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(wrong) -> None:
    """And do not send anyone to read where nothing is."""
    logits = torch.zeros(2, 600)
    logits[1, 5] = wrong
    requests = [Request([1], SamplingSettings(1.0), 9) for _ in range(2)]
    fixed = FixedDrawing(None, torch.ones(2), torch.full((2, 1), 0.999, dtype=torch.float64))
    assert int(fixed.next(logits).max()) < 600
    drawing = Drawing(requests, None)
    drawing.take(*fixed.all())
    with pytest.raises(ValueError, match=r"logits hold NaN.*checkpoint is broken"):
        drawing.proposals([1, 1])
    with pytest.raises(ValueError, match="cannot draw from rows whose mass is"):
        draw_rows(logits.softmax(-1), [0.5, 0.5])


def test_every_slot_of_a_walk_is_the_same_piece(random_target) -> None:
    """Longer blocks do not take longer to compile."""
    target, counts = random_target(), []
    for block in (4, 7):
        drafter = make_drafter(target, block)
        proposer = BlockProposer(drafter, target.head)
        hidden = torch.zeros(2, block, target.hidden_size)
        anchors, uniforms = torch.tensor([1, 2]), torch.full((2, block), 0.5).double()

        def work(proposer=proposer, hidden=hidden, anchors=anchors, uniforms=uniforms):
            drawn = FixedDrawing(None, torch.ones(2), uniforms)
            confidence = proposer._walk(drawn, anchors, proposer._unary(hidden), hidden)
            return *drawn.all(), confidence

        with (
            torch.inference_mode(),
            mock.patch.dict(compiling._COMPILED, clear=True),
            mock.patch.object(compiling, "_compile", lambda piece, args: piece),
        ):
            found = compiled(work, [])()
            counts.append(len(compiling._COMPILED))
            for one, other in zip(found, work(), strict=True):
                torch.testing.assert_close(one, other)
    assert counts[0] == counts[1] < 5
