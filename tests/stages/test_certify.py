"""The certificate: what it says about a sound decoder, and that it finds unsound ones."""

import json
from unittest import mock

import pytest

from dspark_train.decoding.certificate import FAULTS, compare, detectable, round_law
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer, LookupProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.verdicts import decide
from dspark_train.stages import certify
from tests.random_drafter import make_drafter

PROMPT = [1, 2, 1, 0, 2, 1]
SAMPLERS = {
    "T=1": SamplingSettings(1.0, allowed_tokens=[0, 1, 2], seed=0),
    "filtered": SamplingSettings(
        0.9, top_k=2, repetition_penalty=1.2, allowed_tokens=[0, 1, 2], seed=0
    ),
    "greedy": SamplingSettings(allowed_tokens=[0, 1, 2]),
}
QUICK = ("certify.prompts=2", "certify.samples=100", "certify.rows=50", "certify.max_new_tokens=8")


def law(random_target, sampler, proposer="drafter", fault=None, head="vanilla"):
    target = random_target(vocab_size=5, num_layers=2)
    proposers = {
        "drafter": BlockProposer(make_drafter(target, 2, True, head), target.head, 5),
        "lookup": LookupProposer(3, shortest=1),
    }
    engine = Engine(target, proposers[proposer], 5)
    engine.decide = fault or decide
    request = Request(PROMPT, SAMPLERS[sampler], 8)
    engine.add([request])
    return round_law(engine, request, 2)


@pytest.mark.parametrize("proposer", ["drafter", "lookup"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_law_of_a_round_is_the_targets(random_target, sampler, proposer):
    found = law(random_target, sampler, proposer)
    assert found.error < certify.EXACT
    assert found.pass_error < 1e-5
    certain = proposer == "lookup" or sampler == "greedy"
    assert found.proposals == 1 if certain else found.proposals > 3
    assert found.drafts == 2


@pytest.mark.parametrize("head", ["rnn", None])
def test_other_heads(random_target, head):
    assert law(random_target, "T=1", head=head).error < certify.EXACT


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_break_the_law(random_target, fault):
    assert law(random_target, "T=1", fault=FAULTS[fault]).error > 1e-3


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"misremembers_the_drafter"}))
def test_faults_break_the_law_of_certain_drafts(random_target, fault):
    assert law(random_target, "T=1", "lookup", FAULTS[fault]).error > 1e-3


def test_a_draft_that_is_not_the_recorded_draw_is_refused(random_target):
    """Fault kind 1."""
    target = random_target(vocab_size=5, num_layers=2)
    proposer = BlockProposer(make_drafter(target, 2), target.head, 5)
    engine, request = Engine(target, proposer, 5), Request(PROMPT, SAMPLERS["T=1"], 8)
    engine.add([request])
    propose = proposer.propose

    def unlawful(requests, limits):
        (proposal,) = propose(requests, limits)
        return [type(proposal)(proposal.tokens, proposal.probs.flip(-1))]

    with (
        mock.patch.object(proposer, "propose", unlawful),
        pytest.raises(ValueError, match="is not the draw from its recorded distribution"),
    ):
        round_law(engine, request, 2)


def test_comparison_tells_lots_apart_as_often_as_it_says():
    same = compare([1, 1, 2] * 100, [1, 2, 1] * 100)
    assert (same.p_value, same.total_variation, same.bins) == (pytest.approx(1), 0, 3)
    # by hand: 40 of 100 against 60 of 100 gives a statistic of 8 with one degree of freedom
    apart = compare([0] * 40 + [1] * 60, [0] * 60 + [1] * 40)
    assert apart.p_value == pytest.approx(0.004678, abs=1e-5)
    assert apart.total_variation == pytest.approx(0.2)
    rare = compare(list(range(100)), list(range(100)))  # all share one bin
    assert (rare.p_value, rare.bins) == (1.0, 1)
    few, many = (detectable([0, 1, 1, 2] * n, 1e-3) for n in (25, 2500))
    assert many <= 0.02 < few <= 0.5


def test_a_sound_checkpoint_is_certified(tiny_run_finished, tmp_path):
    ended = tiny_run_finished("stages=[certify]", *QUICK)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / "run/certify/certificate.json").read_text())
    assert report["lossless"]
    assert [check["passed"] for check in report["checks"]] == [True] * 5
    assert report["settings"]["temperature"] == 0.7
    page = (tmp_path / "run/certify/certificate.md").read_text()
    assert "decoding is lossless" in page
    assert page.count("| yes |") == 5


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("misremembers_the_drafter", "exact law of a round"),
        ("accepts_everything", "greedy identity"),
    ],
)
def test_an_unsound_decoder_is_not(tiny_run_finished, tmp_path, fault, named):
    """The decoder itself has the fault: a message, a status, and the page says so."""
    with mock.patch("dspark_train.decoding.engine.decide", FAULTS[fault]):
        ended = tiny_run_finished("stages=[certify]", *QUICK)
    assert ended.status != 0
    assert named in ended.message
    assert not json.loads((tmp_path / "run/certify/certificate.json").read_text())["lossless"]
    assert "NOT lossless" in (tmp_path / "run/certify/certificate.md").read_text()


def test_greedy_and_other_proposers_are_certified(tiny_run_finished):
    for more in (("certify.temperature=0",), ("certify.proposer=lookup",)):
        ended = tiny_run_finished("stages=[certify]", *QUICK, *more)
        assert ended.status == 0, ended.err
    ended = tiny_run_finished("stages=[certify]", "certify.proposer=magic", "certify.samples=0")
    assert "certify.proposer=magic" in ended.message
    assert "certify.samples=0" in ended.message
    ended = tiny_run_finished("stages=[certify]", *QUICK, "certify.vocabulary=100000")
    assert "certify.vocabulary=100000" in ended.message
    assert "tokens" in ended.message
