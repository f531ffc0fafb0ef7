"""Law 5 with penalties, bans, biases and processors: each position sees the tokens before it.

The expected distribution is written down here row by row, from the definitions; the decoder's is
enumerated (fault kinds 4, 11, 12, 17).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from dspark_train.decoding import request as request_module
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.processors import process
from dspark_train.decoding.proposers import BlockProposer, LookupProposer
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target
from tests.exploration import explore
from tests.random_drafter import make_drafter

PROMPT, LENGTH, VOCABULARY, EOS = [1, 2, 1], 4, 4, 3
TOLERANCE = 1e-6


class EvenAfterOdd:
    """A user's own processor: after an odd token, odd ones are banned; it depends on the prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[input_ids[:, -1] % 2 == 1, 1::2] = float("-inf")
        return scores


SAMPLERS = {
    "typical": SamplingSettings(1.6, typical_p=0.8),
    "repetition": SamplingSettings(0.8, repetition_penalty=1.7),
    "presence and frequency": SamplingSettings(
        1.0, presence_penalty=0.8, frequency_penalty=1.1, top_k=3
    ),
    "bias": SamplingSettings(1.0, logit_bias={0: 1.5, 2: float("-inf")}),
    "allowed": SamplingSettings(0.7, allowed_tokens=[0, 2]),
    "bad words": SamplingSettings(1.0, bad_words=[[2], [1, 0], [0, 0, 1]]),
    "begin": SamplingSettings(1.0, suppress_at_begin=[0, 1]),
    "min tokens": SamplingSettings(1.0, min_tokens=3),
    "own": SamplingSettings(1.0, processors=[EvenAfterOdd(), NoRepeatNGramLogitsProcessor(3)]),
    "all": SamplingSettings(
        0.7,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias={0: 0.5},
        bad_words=[[0, 0]],
        min_tokens=2,
        suppress_at_begin=[1],
        processors=[EvenAfterOdd()],
    ),
    "greedy": SamplingSettings(
        0.0, repetition_penalty=1.5, presence_penalty=2.0, bad_words=[[0, 1]], min_tokens=2
    ),
}


def expected_row(
    logits: torch.Tensor, prefix: Sequence[int], settings: SamplingSettings
) -> torch.Tensor:
    """Distribution of the token after `prefix`, from the definitions, one token at a time."""
    s, new = settings, list(prefix[len(PROMPT) :])
    scores = logits.double().tolist()
    for token in range(VOCABULARY):
        scores[token] += s.logit_bias.get(token, 0.0)
        if s.allowed_tokens is not None and token not in s.allowed_tokens:
            scores[token] = -float("inf")
        if token in prefix:
            factor = s.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in new:
            scores[token] -= s.presence_penalty + s.frequency_penalty * new.count(token)
        for word in s.bad_words:
            if word[-1] == token and [*prefix, token][-len(word) :] == word:
                scores[token] = -float("inf")
        if token == EOS and len(new) < s.min_tokens:
            scores[token] = -float("inf")
        if token in s.suppress_at_begin and not new:
            scores[token] = -float("inf")
    row = torch.tensor([scores])
    for processor in s.processors:
        row = processor(torch.tensor([prefix]), row)
    row = row[0]
    if s.greedy:
        return torch.nn.functional.one_hot(row.argmax(), VOCABULARY).double()
    row = row / s.temperature
    if s.top_k:
        row[row < row.sort().values[-s.top_k]] = -float("inf")
    probs = row.softmax(0)
    if s.top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= s.top_p]] = 0
    if s.typical_p < 1:
        surprise = -probs.log()
        distance = (surprise - (probs * surprise).nansum()).abs()
        order = distance.argsort()
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= s.typical_p]] = 0
    return probs / probs.sum()


def expected(target: Target, settings: SamplingSettings) -> dict[tuple[int, ...], float]:
    """Probability of every output; outputs end behind an EOS."""
    found = {}
    with torch.no_grad():
        for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
            if EOS in sequence:
                sequence = sequence[: sequence.index(EOS) + 1]
            if sequence in found:
                continue
            logits = target.model(input_ids=torch.tensor([[*PROMPT, *sequence]])).logits[0]
            found[sequence] = 1.0
            for i, token in enumerate(sequence):
                place = len(PROMPT) - 1 + i
                row = expected_row(logits[place], [*PROMPT, *sequence[:i]], settings)
                found[sequence] *= float(row[token])
    return found


def greatest_error(engine: Engine, settings: SamplingSettings) -> float:
    found = explore(engine, PROMPT, settings, LENGTH, (EOS,)).probabilities
    theirs = expected(engine.target, settings)
    assert set(found) <= set(theirs)
    return max(abs(found.get(key, 0.0) - p) for key, p in theirs.items())


@pytest.fixture
def engine_of(random_target: Callable[..., Target]) -> Callable[..., Engine]:
    def make(head: str | None = "vanilla", **options: object) -> Engine:
        target = random_target(vocab_size=VOCABULARY, num_layers=2)
        drafter = make_drafter(target, 2, True, head)
        return Engine(
            target, BlockProposer(drafter, target.head, VOCABULARY, **options), VOCABULARY
        )

    return make


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_block_drafts_are_lossless(engine_of, sampler):
    assert greatest_error(engine_of(), SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize("sampler", ["typical", "all"])
def test_without_a_sequential_head(engine_of, sampler):
    assert greatest_error(engine_of(None), SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize("sampler", ["repetition", "presence and frequency", "own", "greedy"])
def test_certain_drafts_are_lossless(random_target, sampler):
    engine = Engine(random_target(vocab_size=4, num_layers=2), LookupProposer(3, shortest=1), 4)
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize(
    "drafts", [SamplingSettings(0.0), SamplingSettings(1.5), SamplingSettings(0.5, top_k=2)]
)
@pytest.mark.parametrize("sampler", ["typical", "all"])
def test_drafts_with_a_sampler_of_their_own(engine_of, sampler, drafts):
    """Greedy drafts are certain and sampled ones recorded, whatever the target's sampler is."""
    assert greatest_error(engine_of(sampler=drafts), SAMPLERS[sampler]) < TOLERANCE


def planted(change: Callable[..., tuple]):
    """Processors get other arguments than they should."""

    def wrong(logits, processors, tokens, drafts, first=0):
        return process(logits, *change(processors, tokens, drafts), first)

    return mock.patch.object(request_module, "process", wrong)


FAULTS = {
    "drafts of the block are not seen": lambda ps, ts, ds: (ps, ts, [ts[-1]] * len(ds)),
    "only the last token is seen": lambda ps, ts, ds: (ps, [ts[-1]] * len(ts), ds),
    "processors are forgotten": lambda ps, ts, ds: ([], ts, ds),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(engine_of, fault):
    with planted(FAULTS[fault]):
        assert greatest_error(engine_of(), SAMPLERS["all"]) > 1e-3


def test_a_filter_on_the_target_alone_is_found(engine_of):
    """Drafts recorded with probabilities that they were not drawn from."""
    engine = engine_of(sampler=SamplingSettings(1.5))
    lawful = engine.proposer.propose

    def unlawful(requests, limits):
        (proposal,) = lawful(requests, limits)
        return [replace(proposal, probs=proposal.probs**2 / (proposal.probs**2).sum(1, True))]

    with mock.patch.object(engine.proposer, "propose", unlawful):
        assert greatest_error(engine, SAMPLERS["all"]) > 1e-3
