"""Law 5: the decoder's exact output distribution is the target's (fault kinds 1-6)."""

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_train.decoding import verdicts as verdicts_module
from dspark_train.decoding import verify as verify_module
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer, CausalProposer, LookupProposer, Proposal
from dspark_train.decoding.proposers import drawing as drawing_module
from dspark_train.decoding.sampling import SamplingSettings, warp, warp_rows
from dspark_train.drafter.selector import CandidateSelector
from dspark_train.target import Target
from tests.exploration import explore
from tests.open_numbers import Open, pieces_of
from tests.random_drafter import make_drafter

PROMPT = [1, 2, 1]
SAMPLERS = {
    "greedy": SamplingSettings(0.0),
    "T=1": SamplingSettings(1.0),
    "T=0.7": SamplingSettings(0.7),
    "top-k": SamplingSettings(1.0, top_k=2),
    "top-p": SamplingSettings(1.0, top_p=0.8),
    "combined": SamplingSettings(0.7, top_k=3, top_p=0.9),
}
# two proposals each: K = 2 under DSpark's convention, K = 3 under DFlash's
CONVENTIONS = {"dspark": (2, True), "dflash": (3, False)}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def target_distribution(
    target: Target, prompt: list[int], settings: SamplingSettings, length: int, vocabulary: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, by the target and transformers' own warpers."""
    warpers = LogitsProcessorList()
    if not settings.greedy:
        warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    sequences = list(itertools.product(range(vocabulary), repeat=length))
    ids = torch.tensor([[*prompt, *sequence] for sequence in sequences])
    with torch.no_grad():
        logits = target.model(input_ids=ids).logits[:, len(prompt) - 1 : -1, :vocabulary].float()
    flat = logits.reshape(-1, vocabulary)
    if settings.greedy:
        probs = torch.nn.functional.one_hot(flat.argmax(-1), vocabulary).double()
    else:
        probs = warpers(None, flat).double().softmax(-1)
    steps = probs.view(*logits.shape).gather(2, ids[:, len(prompt) :, None])[..., 0]
    return dict(zip(sequences, steps.prod(-1).tolist(), strict=True))


def greatest_error(
    engine: Engine, settings: SamplingSettings, length: int = 4, prompt: list[int] = PROMPT
) -> float:
    """Largest difference of a probability; infinite if an impossible token was ever reached."""
    target = engine.target
    expected = target_distribution(target, prompt, settings, length, engine.vocabulary)
    found = explore(engine, prompt, settings, length)
    possible = {
        ((*prompt, *sequence[:i]), sequence[i])
        for sequence, probability in expected.items()
        if probability > 0
        for i in range(length)
    }
    if not found.reached <= possible:
        return float("inf")
    return max(
        abs(expected.get(sequence, 0.0) - found.probabilities.get(sequence, 0.0))
        for sequence in {*expected, *found.probabilities}
    )


@pytest.fixture
def block_engine(random_target: Callable[..., Target]) -> Callable[..., Engine]:
    """Make an engine of a random target and a random drafter."""

    def make(
        block_size: int = 2,
        sample_from_anchor: bool = True,
        head: str | None = "vanilla",
        vocab_size: int = 4,
        use_heads: bool = True,
        **drafter_config: object,
    ) -> Engine:
        target = random_target(vocab_size=vocab_size, num_layers=2)
        drafter = make_drafter(target, block_size, sample_from_anchor, head, **drafter_config)
        proposer = BlockProposer(drafter, target.head, vocab_size, use_heads)
        return Engine(target, proposer, vocab_size)

    return make


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_block_drafter_is_lossless(block_engine, convention, head, sampler):
    engine = block_engine(*CONVENTIONS[convention], head)
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_top_k": 2}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_dflash2_is_lossless(block_engine, sampler):
    """Two of four tokens are candidates; what was drafted was drawn from those two."""
    engine = block_engine(*CONVENTIONS["dflash"], "selector", **DFLASH2)
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


def test_candidates_that_are_not_accounted_for_are_found(block_engine):
    """Draws among the candidates, with probabilities of the softmax over all tokens."""
    engine = block_engine(*CONVENTIONS["dflash"], "selector", **DFLASH2)
    lawful = engine.proposer.propose

    def unlawful(*given):
        with mock.patch.object(CandidateSelector, "candidates", lambda self, unary: unary):
            (of_all,) = lawful(*given)
        return [Proposal(lawful(*given)[0].tokens, of_all.probs)]

    with mock.patch.object(engine.proposer, "propose", unlawful):
        assert greatest_error(engine, SAMPLERS["T=1"]) > 1e-3


@pytest.mark.parametrize("sight", [{"causal_blocks": "all"}, {"window_from": "anchor"}])
def test_other_sights_are_lossless(block_engine, sight):
    """Causal blocks; and a window of two positions before the anchor, with causal blocks."""
    if "window_from" in sight:
        sight = {**sight, "sliding_window": 2, "causal_blocks": "sliding"}
    engine = block_engine(*CONVENTIONS["dspark"], "rnn", **sight)
    assert greatest_error(engine, SAMPLERS["combined"]) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("head", ["vanilla", None])
def test_a_reduced_draft_vocabulary_is_lossless(block_engine, head, sampler):
    """Tokens 0 and 2 of four can be drafted; all four are committed."""
    engine = block_engine(2, True, head, draft_ids=[0, 2])
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_prompt_lookup_is_lossless(random_target, sampler):
    engine = Engine(random_target(vocab_size=4, num_layers=2), LookupProposer(3, shortest=1), 4)
    prompt = [1, 2, 3, 0, 2, 1, 1, 0, 3, 2]
    assert greatest_error(engine, SAMPLERS[sampler], prompt=prompt) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_smaller_model_is_lossless(random_target, sampler):
    target, smaller = (random_target(vocab_size=4, num_layers=n, seed=n) for n in (2, 1))
    engine = Engine(target, CausalProposer(smaller, 4, num_tokens=2), 4)
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize("sampler", ["T=1", "combined"])
def test_without_the_sequential_head(block_engine, sampler):
    assert greatest_error(block_engine(use_heads=False), SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize(("block_size", "sample_from_anchor"), [(3, True), (4, False)])
def test_longer_block_and_longer_output(block_engine, block_size, sample_from_anchor):
    engine = block_engine(block_size, sample_from_anchor, "rnn")
    assert greatest_error(engine, SAMPLERS["combined"], length=5) < TOLERANCE


def test_larger_vocabulary_with_padding_rows(block_engine):
    """Rows of the LM head beyond the tokenizer get no mass on either side (fault kind 6)."""
    engine = block_engine(vocab_size=6)
    engine.vocabulary = engine.proposer.vocabulary = 5
    assert greatest_error(engine, SAMPLERS["top-p"]) < TOLERANCE


def test_end_of_sequence_inside_a_block(block_engine):
    """Everything after an EOS is dropped, and the shorter outputs have the target's probability."""
    engine, eos, settings = block_engine(), 3, SAMPLERS["T=1"]
    expected: dict[tuple[int, ...], float] = {}
    for sequence, p in target_distribution(engine.target, PROMPT, settings, 4, 4).items():
        end = sequence.index(eos) + 1 if eos in sequence else len(sequence)
        expected[sequence[:end]] = expected.get(sequence[:end], 0.0) + p
    found = explore(engine, PROMPT, settings, 4, (eos,)).probabilities
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_joining_histories_changes_nothing(block_engine):
    """The exploration joins histories of equal tokens; followed one by one they give the same."""
    engine, settings = block_engine(vocab_size=3), SAMPLERS["T=1"]
    joined = explore(engine, PROMPT, settings, 4).probabilities

    def apart(group):
        return ((live, weight, path) for live, (weight, path) in group.items())

    with mock.patch("tests.exploration._merged", apart):
        one_by_one = explore(engine, PROMPT, settings, 4).probabilities
    assert one_by_one == pytest.approx(joined, abs=1e-9)


class RecordsRawProbabilities(BlockProposer):
    """Draws from the filtered distribution and records the one before the filters."""

    def propose(self, requests, limits):
        raw = []

        def recording_warp(logits, settings):
            raw.append(warp(logits, SamplingSettings(settings[0].temperature)))
            return warp_rows(logits, settings)

        with mock.patch.object(drawing_module, "warp_rows", recording_warp):
            (proposal,) = super().propose(requests, limits)
        return [Proposal(proposal.tokens, torch.cat(raw))]


def shifted_by(rows: int):
    return mock.patch.object(
        verdicts_module, "warp_rows", lambda logits, s: warp_rows(logits.roll(rows, 0), s)
    )


FAULTS = {
    "residual counts the draft's share twice": lambda: mock.patch.object(
        verify_module, "residual", lambda target_row, draft_row, token: target_row
    ),
    "logits of the position after": lambda: shifted_by(-1),
    "logits of the position before": lambda: shifted_by(1),
    "accepts at u <= ratio": lambda: mock.patch.object(
        verify_module, "accepts", lambda u, draft, target: u * draft <= target
    ),
    "accepts everything": lambda: mock.patch.object(
        verify_module, "accepts", lambda u, draft, target: target > 0
    ),
    "one number for proposing and accepting": lambda: mock.patch.multiple(
        "tests.open_numbers.Explorer",
        uniform=lambda self, position, purpose, branch=0: Open((position, "u")),
        proposing=lambda self, position, anchor, branch=0: Open((position, "u")),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(block_engine, fault):
    """The same check fails for each fault, in a setting where it matters."""
    engine, settings = block_engine(), SAMPLERS["top-k"]
    assert greatest_error(engine, settings) < TOLERANCE
    with FAULTS[fault]():
        assert greatest_error(engine, settings) > 1e-3


def test_recording_raw_draft_probabilities_is_found(block_engine):
    engine = block_engine()
    lawful = engine.proposer
    engine.proposer = RecordsRawProbabilities(lawful.drafter, lawful.head, lawful.vocabulary)
    assert greatest_error(engine, SAMPLERS["top-k"]) > 1e-3


def test_pieces_are_found_with_and_without_guesses():
    """Steps of any height and width, and a decision that differs at the point 0 alone."""

    def decide(u: float) -> int:
        return -1 if u == 0 else sum(u >= border for border in (0.25, 0.25001, 0.5, 0.5, 0.999))

    for guesses in ((), (0.5, 0.25), (0.1, 0.7)):
        found = pieces_of(decide, guesses)
        assert [piece.value for piece in found] == [-1, 0, 1, 2, 4, 5]
        assert (found[0].low, found[0].high) == (0.0, 0.0)
        borders = [piece.high for piece in found[1:]]
        assert borders == pytest.approx([0.25, 0.25001, 0.5, 0.999, 1.0], abs=1e-11)
        assert [piece.low for piece in found[2:]] == borders[:-1]
