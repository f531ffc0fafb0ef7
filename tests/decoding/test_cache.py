"""Law 6: every cache equals a fresh prefill of what it claims to hold (fault kinds 7, 18-20)."""

import itertools

import pytest
import torch

from dspark_train.decoding.audit import audit
from dspark_train.decoding.cache import DraftCache, KVCache
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer, PlainProposer, Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from tests.random_drafter import make_drafter

K = 3
PROMPT = [1, 4, 2, 0, 3]


class Forced(BlockProposer):
    """Feeds the drafter's cache, but proposes what is accepted `pattern[i]` tokens deep."""

    def script(self, pattern: list[int], truth: list[int]) -> None:
        self.pattern, self.truth = list(pattern), truth

    def propose(self, requests, limits):
        super().propose(requests, limits)
        tokens, right = requests[0].tokens, self.pattern.pop(0)
        drafts = self.truth[len(tokens) : len(tokens) + K]
        drafts[right:] = [(token + 1) % 5 for token in drafts[right:]]
        return [Proposal(drafts[: limits[0]])]


def assert_equals_fresh_prefill(engine: Engine) -> None:
    """Both caches, against one pass over the tokens that they claim to hold."""
    assert audit(engine) < 1e-5


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, num_layers=3, seed=5)


@pytest.fixture
def engine(target):
    return Engine(target, Forced(make_drafter(target, K), target.head))


def greedy(target, count: int) -> list[int]:
    """Prompt and greedy continuation."""
    engine = Engine(target, PlainProposer())
    request = Request(PROMPT, SamplingSettings(), count)
    engine.add([request])
    while request.finish_reason is None:
        engine.step()
    return request.tokens


@pytest.mark.parametrize("pattern", itertools.product(range(K + 1), repeat=2))
def test_every_acceptance_pattern_leaves_fresh_caches(engine, target, pattern):
    truth = greedy(target, 12)
    engine.proposer.script(pattern, truth)
    request = Request(PROMPT, SamplingSettings(), 12)
    engine.add([request])
    for accepted in pattern:
        (round_,) = engine.step()
        assert (round_.proposed, round_.accepted) == (K, accepted)
        assert engine.cache.lengths == [len(request.tokens) - 1]
        assert_equals_fresh_prefill(engine)
    assert request.tokens == truth[: len(request.tokens)]


def test_an_eos_inside_a_block_cuts_both_caches(engine, target):
    truth = greedy(target, 12)
    eos = truth[len(PROMPT) + 1]  # the first of the K drafts
    assert eos != truth[len(PROMPT)]
    engine.proposer.script([K], truth)
    request = Request(PROMPT, SamplingSettings(), 12, (eos,))
    engine.add([request])
    (round_,) = engine.step()
    assert request.finish_reason == "stop"
    assert request.new_tokens[-1] == eos
    assert (round_.proposed, round_.accepted, round_.committed, round_.judged) == (K, 1, 1, 1)
    assert engine.cache.lengths == [len(request.tokens)]
    assert_equals_fresh_prefill(engine)


def test_rounds_without_proposals_still_feed_the_drafter(engine, target):
    """Fault kind 18: proposing 3, then 0, then 3."""
    truth, request = greedy(target, 12), Request(PROMPT, SamplingSettings(), 12)
    engine.proposer.script([2, 2], truth)
    engine.add([request])
    engine.step()
    propose = engine.proposer.propose
    engine.proposer.propose = lambda *args: [Proposal()]
    assert engine.step()[0].proposed == 0
    engine.proposer.propose = propose
    engine.step()
    assert_equals_fresh_prefill(engine)


def test_the_audit_finds_one_wrong_entry_and_wrong_lengths(engine, target):
    """One position that stands for a rejected token, in one layer of either cache."""
    truth, request = greedy(target, 12), Request(PROMPT, SamplingSettings(), 12)
    engine.proposer.script([2, 1], truth)
    engine.add([request])
    engine.step()
    engine.step()
    assert_equals_fresh_prefill(engine)
    place = len(request.tokens) - 2
    for cache in (engine.cache, engine.proposer.cache):
        entry = cache.layers[-1].keys[0, :, place]
        with torch.inference_mode():
            kept = entry.clone()
            entry += 0.01 * entry.abs().max()
            assert audit(engine) > 1e-3
            entry.copy_(kept)
        assert_equals_fresh_prefill(engine)
        cache.lengths[0] -= 1
        with pytest.raises(ValueError, match="holds"):
            audit(engine)
        cache.lengths[0] += 1


def test_a_request_leaves_nothing_behind_for_the_next(engine, target):
    """Fault kinds 20 and 22: caches are reused, their content is not, and they do not grow."""
    truth = greedy(target, 12)
    sizes = set()
    for _ in range(3):
        engine.proposer.script([K, 0, K, K, K], truth)
        request = Request(PROMPT, SamplingSettings(), 12)
        engine.add([request])
        while request.finish_reason is None:
            engine.step()
        assert request.tokens == truth
        assert_equals_fresh_prefill(engine)
        engine.take_finished()
        sizes.add((engine.cache.nbytes, engine.proposer.cache.nbytes))
    assert len(sizes) == 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_ragged_rows_equal_single_rows(random_target, implementation):
    """Rows of different lengths in one pass, several tokens each, growth and rollback between."""
    target = random_target(attn_implementation=implementation)
    prompts = [[1, 2, 3], [4, 0, 1, 2, 2, 3, 1], [2]]
    batch = KVCache(target.num_layers, num_rows=3, block=4)
    singles = [KVCache(target.num_layers) for _ in prompts]

    def read(cache: KVCache, ids: list[list[int]]) -> torch.Tensor:
        q, lengths = len(ids[0]), torch.tensor(cache.active_lengths)
        return target.forward(
            torch.tensor(ids),
            position_ids=lengths[:, None] + torch.arange(q),
            attention_mask=cache.mask(q, target.dtype, "cpu"),
            cache=cache,
        ).last_hidden

    for row, prompt in enumerate(prompts):
        batch.activate(row, row + 1)
        read(batch, [prompt])
        read(singles[row], [prompt])
    batch.activate(0, 3)
    for q, keep in [(1, 1), (4, 2), (3, 0), (5, 5)]:
        ids = [[(row + i) % 5 for i in range(q)] for row in range(3)]
        together = read(batch, ids)
        for row, single in enumerate(singles):
            alone = read(single, [ids[row]])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)
            single.truncate([single.lengths[0] - q + keep])
        batch.truncate([length - q + keep for length in batch.active_lengths])
    assert batch.lengths == [single.lengths[0] for single in singles] == [11, 15, 9]


def test_a_moved_row_keeps_its_content(target):
    cache = KVCache(target.num_layers, num_rows=2)
    for row, prompt in enumerate(([1, 2, 3], [4, 0])):
        cache.activate(row, row + 1)
        target.forward(torch.tensor([prompt]), cache=cache)
    cache.move_row(1, 0)
    assert cache.lengths == [2, 2]
    for layer in cache.layers:
        assert torch.equal(layer.keys[0, :, :2], layer.keys[1, :, :2])


def test_what_cannot_be_held_or_cut_is_refused(target):
    cache = KVCache(target.num_layers)
    target.forward(torch.tensor([[1, 2, 3]]), cache=cache)
    for length in (4, -1):
        with pytest.raises(ValueError, match="holds 3 positions"):
            cache.truncate([length])
    with pytest.raises(ValueError, match="rows 0:2"):
        cache.activate(0, 2)
    with pytest.raises(ValueError, match="2 rows, but 1"):
        target.forward(torch.tensor([[1], [2]]), cache=cache)
    with pytest.raises(NotImplementedError, match="truncate"):
        cache.crop(-1)


def test_capacity_grows_by_blocks_and_keeps_what_is_held():
    cache = DraftCache(num_layers=1, block=4)
    pieces = [torch.randn(1, 2, n, 3) for n in (3, 1, 6, 2)]
    for piece in pieces:
        cache.append([(piece, -piece)], [piece.shape[2]])
    assert (cache.lengths, cache.capacity) == ([12], 12)
    keys, values = cache.context()[0]
    assert torch.equal(keys, torch.cat(pieces, dim=2))
    assert torch.equal(values, -keys)
    assert cache.nbytes == 2 * 4 * 2 * 12 * 3
