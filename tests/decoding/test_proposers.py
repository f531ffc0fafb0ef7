"""Proposers: what they propose, and that they say what it was drawn from (fault kinds 1, 3, 21)."""

from dataclasses import replace

import pytest
import torch

from dspark_train.blocks import ContextSpan
from dspark_train.decoding.audit import audit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import (
    BlockProposer,
    CausalProposer,
    LookupProposer,
    PlainProposer,
    Proposal,
)
from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw, warp
from tests.random_drafter import make_drafter

PROMPT = [1, 4, 2, 0, 3, 3]
SAMPLED = SamplingSettings(0.8, top_k=4)


def observed(target, proposer, tokens: list[int]) -> None:
    """Give the proposer the features of everything before the anchor."""
    proposer.start(0)
    features = target.forward(torch.tensor([tokens[:-1]]), taps=proposer.taps).features
    proposer.observe(0, [request_of(tokens)], features, [len(tokens) - 1])


def request_of(tokens: list[int], settings: SamplingSettings = SAMPLED, seed: int = 0) -> Request:
    return Request(tokens, replace(settings, seed=seed), 99)


def propose(
    proposer,
    tokens: list[int],
    settings: SamplingSettings = SAMPLED,
    seed: int = 0,
    limit: int = 99,
) -> Proposal:
    (proposal,) = proposer.propose([request_of(tokens, settings, seed)], [limit])
    return proposal


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=7, num_layers=3)


@pytest.mark.parametrize("settings", [SamplingSettings(), SAMPLED])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "selector", None])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_cached_walk_equals_the_masked_forward(target, sample_from_anchor, head, settings):
    """Law 1: all positions in the row, a mask instead of a cache, predecessors teacher-forced."""
    dflash2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_top_k": 5}
    config = dflash2 if head == "selector" else {}
    drafter = make_drafter(target, 4, sample_from_anchor, head, **config).eval()
    proposer = BlockProposer(drafter, target.head)
    observed(target, proposer, PROMPT)
    anchor = len(PROMPT) - 1
    proposal = propose(proposer, PROMPT, settings)
    slots = drafter.slots
    assert len(proposal.tokens) == slots.num_proposals == (4 if sample_from_anchor else 3)

    row = torch.tensor([[*PROMPT, 5, 6]])  # what follows the anchor must not matter
    features = target.forward(row, taps=proposer.taps).features
    context = drafter.context_kv(features, torch.arange(row.shape[1])[None])
    span = ContextSpan(torch.tensor([[0]]), torch.tensor([[anchor]]))
    ids = slots.inputs(torch.tensor([[PROMPT[-1]]]), drafter.config.mask_token_id)
    positions = slots.positions(torch.tensor([[anchor]]))
    hidden = drafter.backbone(target.head.embed(ids), positions, context, span)
    hidden = hidden[0, 0, slots.proposing]
    logits = target.head.logits(hidden)
    embeddings = None
    if head is not None:
        previous = torch.tensor([PROMPT[-1], *proposal.tokens[:-1]])
        latents, embeddings = drafter.markov_head.latents(hidden, previous)
        logits = drafter.markov_head.candidates(logits) + drafter.markov_head.markov_w2(latents)
    probs = warp(logits, settings)
    confidence = drafter.confidence_head.logits(hidden, embeddings)
    torch.testing.assert_close(proposal.confidence, confidence, rtol=1e-4, atol=1e-5)
    if settings.greedy:
        assert proposal.probs is None
        assert proposal.tokens == probs.argmax(-1).tolist()
    else:
        torch.testing.assert_close(proposal.probs, probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["rnn", None])
def test_drafts_are_draws_from_the_recorded_distribution(random_target, head, dtype):
    """Fault kind 1: in bf16 too, and fault kind 3: probabilities are never missing."""
    target = random_target(vocab_size=7)
    drafter = make_drafter(target, 4, head=head).to(dtype)
    target.model.to(dtype)
    proposer, randomness = BlockProposer(drafter, target.head), Randomness(5)
    observed(target, proposer, PROMPT)
    proposal = propose(proposer, PROMPT, seed=5)
    assert proposal.probs.dtype == torch.float32
    for i, (token, row) in enumerate(zip(proposal.tokens, proposal.probs, strict=True)):
        assert row.sum().item() == pytest.approx(1, abs=1e-5)
        assert token == draw(row, randomness.proposing(len(PROMPT) + i, len(PROMPT) - 1))


@pytest.mark.parametrize("settings", [SamplingSettings(), SAMPLED])
def test_a_limit_shortens_the_proposal_and_changes_nothing_else(target, settings):
    proposer = BlockProposer(make_drafter(target, 4, head="rnn"), target.head)
    observed(target, proposer, PROMPT)
    whole = propose(proposer, PROMPT, settings, 1, 4)
    for limit in (1, 2, 3):
        part = propose(proposer, PROMPT, settings, 1, limit)
        assert part.tokens == whole.tokens[:limit]
        torch.testing.assert_close(part.confidence, whole.confidence[:limit])


def test_without_heads_neither_bias_nor_confidence(target):
    drafter = make_drafter(target, 4)
    proposer = BlockProposer(drafter, target.head, use_heads=False)
    observed(target, proposer, PROMPT)
    proposal = propose(proposer, PROMPT, SamplingSettings(), 1, 4)
    drafter.markov_head.markov_w2.weight.data.zero_()
    with_heads = BlockProposer(drafter, target.head)
    observed(target, with_heads, PROMPT)
    assert proposal.tokens == propose(with_heads, PROMPT, SamplingSettings(), 1, 4).tokens
    assert proposal.confidence is None


def test_padding_rows_are_never_proposed(target):
    for head in ("vanilla", None):
        proposer = BlockProposer(make_drafter(target, 4, head=head), target.head, vocabulary=2)
        observed(target, proposer, PROMPT)
        for settings in (SamplingSettings(), SamplingSettings(5.0)):
            proposal = propose(proposer, PROMPT, settings, 1, 4)
            assert max(proposal.tokens) < 2
            assert settings.greedy or proposal.probs.shape == (4, 2)


def test_a_pass_that_was_not_observed_is_noticed(target):
    proposer = BlockProposer(make_drafter(target), target.head)
    observed(target, proposer, PROMPT)
    with pytest.raises(RuntimeError, match=r"holds 5 positions, expected the 6"):
        propose(proposer, [*PROMPT, 1], SamplingSettings(), 1, 4)


def test_drafting_reaches_the_last_position_of_the_context(random_target):
    """Fault kind 21: slots near and beyond the longest context have rotary angles."""
    target = random_target(max_position_embeddings=16)
    drafter = make_drafter(target)
    engine = Engine(target, BlockProposer(drafter, target.head))
    request = Request([1, 2], SamplingSettings(), 14)
    engine.add([request])
    while request.finish_reason is None:
        engine.step()
    assert len(request.tokens) == 16


def looked_up(proposer: LookupProposer, tokens: list[int], limit: int = 99) -> list[int]:
    return propose(proposer, tokens, limit=limit).tokens


def test_lookup_copies_what_followed_the_longest_suffix():
    proposer = LookupProposer(num_tokens=3, longest=3, shortest=1)
    assert looked_up(proposer, [1, 2, 3, 7, 8, 9, 2, 3, 5, 1, 2, 3]) == [7, 8, 9]


def test_lookup_prefers_the_latest_occurrence_and_sees_its_own_output():
    proposer = LookupProposer(num_tokens=2, shortest=1)
    proposer.start(0)
    assert looked_up(proposer, [1, 5, 6, 1, 7, 8, 1]) == [7, 8]
    assert looked_up(proposer, [1, 5, 6, 1, 7, 8, 1, 9, 4, 1]) == [9, 4]


def test_lookup_may_overlap_with_the_suffix_and_obeys_the_limit():
    proposer = LookupProposer(num_tokens=4, shortest=1)
    assert looked_up(proposer, [5, 5, 5]) == [5]
    assert looked_up(proposer, [1, 2, 1, 2, 1], limit=1) == [2]


def test_lookup_without_a_match_proposes_nothing_and_forgets_between_requests():
    proposer = LookupProposer(shortest=1)
    assert looked_up(proposer, [1, 2, 3]) == []
    assert looked_up(proposer, [1, 2, 3, 1]) == [2, 3, 1]
    proposer.start(0)
    assert looked_up(proposer, [1]) == []
    assert looked_up(LookupProposer(shortest=2), [1, 2, 9, 2]) == []


def test_lookup_refuses_lengths_out_of_order():
    for wrong in ({"num_tokens": 0}, {"longest": 1, "shortest": 2}, {"shortest": 0}):
        with pytest.raises(ValueError, match="num_tokens"):
            LookupProposer(**wrong)


def test_plain_proposes_nothing():
    assert propose(PlainProposer(), [1]).tokens == []


def test_a_model_as_its_own_drafter_is_accepted_whole(random_target):
    """200 rounds: its cache lacks one token after every full acceptance, and catches up."""
    target = random_target(vocab_size=7, max_position_embeddings=1024)
    engine = Engine(target, CausalProposer(target, num_tokens=3))
    request = Request(PROMPT, SamplingSettings(), 801)
    engine.add([request])
    for _ in range(200):
        (round_,) = engine.step()
        assert (round_.proposed, round_.accepted) == (3, 3)
    assert request.finish_reason == "length"
    assert audit(engine) < 1e-5


def test_a_model_of_a_shorter_context_drafts_until_its_end(random_target):
    target = random_target(vocab_size=7, max_position_embeddings=64)
    smaller = random_target(vocab_size=7, num_layers=1, max_position_embeddings=16)
    engine = Engine(target, CausalProposer(smaller, num_tokens=4))
    request, proposed = Request(PROMPT, SamplingSettings(), 30), []
    engine.add([request])
    while request.finish_reason is None:
        proposed.append((len(request.tokens), engine.step()[0].proposed))
    assert max(n for length, n in proposed if length < 12) == 4
    assert {n for length, n in proposed if length >= 16} == {0}
    plain = Engine(target, PlainProposer())
    alone = Request(PROMPT, SamplingSettings(), 30)
    plain.add([alone])
    while alone.finish_reason is None:
        plain.step()
    assert request.tokens == alone.tokens


def test_a_model_of_another_vocabulary_is_refused(target, random_target):
    with pytest.raises(ValueError, match="5 token ids and the target 7"):
        CausalProposer(random_target(vocab_size=5), 7)
    with pytest.raises(ValueError, match="num_tokens=0"):
        CausalProposer(target, num_tokens=0)


def test_a_draft_id_beyond_the_tokenizer_is_refused(random_target):
    target = random_target(vocab_size=7)
    drafter = make_drafter(target, draft_ids=[0, 6])
    with pytest.raises(ValueError, match=r"can propose token 6, .* tokenizer has 6"):
        BlockProposer(drafter, target.head, vocabulary=6)


def test_drafts_of_a_reduced_vocabulary_have_the_targets_ids(target):
    """Drawn over its own columns, or over the target's because a bias is told by its ids."""
    drafted = []
    for settings in (SAMPLED, replace(SAMPLED, logit_bias={2: 0.0})):
        proposer = BlockProposer(make_drafter(target, draft_ids=[1, 2, 5]), target.head)
        observed(target, proposer, PROMPT)
        drafted.append(propose(proposer, PROMPT, settings))
    for proposal in drafted:
        assert set(proposal.tokens) <= {1, 2, 5}
        assert proposal.probs.shape == (4, 7)
        assert proposal.probs[:, [0, 3, 4, 6]].sum() == 0
        torch.testing.assert_close(proposal.probs.sum(1), torch.ones(4))
    assert drafted[0].tokens == drafted[1].tokens
    torch.testing.assert_close(drafted[0].probs, drafted[1].probs)
