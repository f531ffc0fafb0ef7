"""Trees through the engine: paths, caches, batches, seeds, ends (kinds 7, 8, 13, 14, 18)."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding import engine as engine_module
from dspark_train.decoding.audit import audit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import (
    BlockProposer,
    PlainProposer,
    Tree,
    TreeProposer,
    TreeShape,
)
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Fixed
from dspark_train.decoding.tree_pass import refuse_without_trees
from dspark_train.target import Target, TargetOutput
from dspark_train.target.cpu import GROUPED
from tests.decoding.test_engine import PROMPTS, requests, run
from tests.decoding.test_windows import FAMILIES, SMALL
from tests.random_drafter import make_drafter

K = 3
PROMPT = [1, 4, 2, 0, 3]
# two nodes behind the anchor, two behind each of them, one behind the last
PARENTS = [0, 0, 1, 1, 2, 2, 6]
PATHS = [[], [1], [2], [1, 3], [1, 4], [2, 5], [2, 6], [2, 6, 7]]


class Forced(TreeProposer):
    """Feeds the drafter's cache, but proposes a tree of which `path` is right."""

    def script(self, paths: list[list[int]], truth: list[int]) -> None:
        self.paths, self.truth = list(paths), truth

    def propose(self, requests, limits):
        super().propose(requests, limits)
        first, path = len(requests[0].tokens), self.paths.pop(0)
        depth = {0: 0}
        for node, parent in enumerate(PARENTS, start=1):
            depth[node] = depth[parent] + 1
        right = {node: self.truth[first + depth[node] - 1] for node in depth if node}
        tokens = [right[n] if n in path else (right[n] + n) % 5 for n in range(1, 8)]
        # a wrong token must not be right by chance
        tokens = [
            t if n in path or t != right[n] else (t + 1) % 5 for n, t in enumerate(tokens, start=1)
        ]
        return [Tree(tokens, parents=PARENTS, room=9)]


@pytest.fixture
def target(random_target: Callable[..., Target]) -> Target:
    return random_target(vocab_size=5, num_layers=3, seed=5)


@pytest.fixture
def engine(target: Target) -> Engine:
    return Engine(target, Forced(TreeShape(7, 2), make_drafter(target, K), target.head))


def plain_tokens(target: Target, count: int) -> list[int]:
    request = Request(PROMPT, SamplingSettings(), count)
    run(Engine(target, PlainProposer()), [request])
    return request.tokens


def tree_engine(target: Target, nodes: int = 6, branches: int = 3, **options: object) -> Engine:
    drafter = make_drafter(target, 4, True, "rnn")
    return Engine(target, TreeProposer(TreeShape(nodes, branches), drafter, target.head), **options)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_every_accepted_path_leaves_fresh_caches(engine, target, path):
    """Also behind rounds whose paths were others, and one that drafted nothing (fault kind 18)."""
    truth, request = plain_tokens(target, 24), Request(PROMPT, SamplingSettings(), 24)
    paths = [[2, 6], path, [1, 4], path]
    engine.proposer.script(paths, truth)
    engine.add([request])
    for count, wanted in enumerate(paths):
        if count == 2:
            engine.scheduler = Fixed(0)
            assert engine.step()[0].proposed == 0
            engine.scheduler = Fixed()
        (round_,) = engine.step()
        assert (round_.proposed, round_.accepted) == (7, len(wanted))
        leaf = wanted != [] and wanted[-1] in (3, 4, 5, 7)
        assert round_.judged == len(wanted) + (not leaf)
        assert engine.cache.lengths == [len(request.tokens) - 1]
        assert audit(engine) < 1e-5
    assert request.tokens == truth[: len(request.tokens)]


def not_moved(cache, output, paths):
    return output


def features_not_moved(cache, output, paths):
    cache.rearrange(output.last_hidden.shape[1], [[0, *path] for path in paths])
    return output


def siblings_moved(cache, output, paths):
    cache.rearrange(output.last_hidden.shape[1], [[0, *(n - 1 for n in path)] for path in paths])
    return TargetOutput(output.last_hidden, output.features)


@pytest.mark.parametrize("fault", [not_moved, features_not_moved, siblings_moved])
def test_the_audit_finds_paths_that_lie_wrong(engine, target, fault):
    request = Request(PROMPT, SamplingSettings(), 24)
    engine.proposer.script([[2, 6]], plain_tokens(target, 24))
    engine.add([request])
    with mock.patch.object(engine_module, "straighten", fault):
        engine.step()
    assert audit(engine) > 1e-3


def test_an_eos_on_the_path_cuts_both_caches(engine, target):
    truth = plain_tokens(target, 24)
    eos = truth[len(PROMPT) + 1]  # the first draft of the path
    assert eos != truth[len(PROMPT)]
    request = Request(PROMPT, SamplingSettings(), 24, (eos,))
    engine.proposer.script([[2, 6, 7]], truth)
    engine.add([request])
    (round_,) = engine.step()
    assert (request.finish_reason, request.new_tokens[-1]) == ("stop", eos)
    assert (round_.accepted, round_.committed, round_.judged) == (1, 1, 1)
    assert audit(engine) < 1e-5


@pytest.mark.parametrize("scheduler", [None, Fixed(2)])
def test_a_request_gives_the_same_alone_and_in_any_batch(target, scheduler):
    """Every sampler, seed, length and stop at once (fault kinds 7, 13, 14)."""
    expected = []
    for request in requests():
        run(tree_engine(target, scheduler=scheduler), [request])
        expected.append((request.new_tokens, request.finish_reason))
    assert {reason for _, reason in expected} == {"stop", "length"}
    batch = requests()
    together = tree_engine(target, rows=3, scheduler=scheduler)
    waiting = list(batch)
    while waiting or together.requests:
        if waiting and together.free:
            together.add([waiting.pop()])
        else:
            together.step()
            assert audit(together) < 1e-5
        together.take_finished()
    assert [(r.new_tokens, r.finish_reason) for r in batch] == expected


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_a_tree_of_one_branch_is_the_chain(target, row):
    """The same drafts, numbers, verdicts and tokens, round by round."""
    found = []
    for shape in (None, TreeShape(4, 1)):
        drafter = make_drafter(target, 4, True, "rnn")
        proposer = BlockProposer(drafter, target.head)
        if shape is not None:
            proposer = TreeProposer(shape, drafter, target.head)
        engine, request = Engine(target, proposer), requests()[row]
        engine.add([request])
        rounds = []
        while request.finish_reason is None:
            (one,) = engine.step()
            rounds.append((one.proposed, one.accepted, one.judged, one.committed))
        found.append((request.new_tokens, rounds))
    assert found[0] == found[1]


def test_the_best_candidates_give_longer_paths_than_a_chain(target):
    """Greedy: more nodes never shorten a path, and the tokens stay those of plain decoding."""
    truth, taus = plain_tokens(target, 40), []
    for nodes, branches in ((3, 1), (8, 3), (24, 4)):
        decoder = SpeculativeDecoder(
            target, TreeProposer(TreeShape(nodes, branches), make_drafter(target, K), target.head)
        )
        result = decoder.generate(PROMPT, 40, logprobs=2)
        assert PROMPT + result.tokens == truth
        taus.append(result.stats.tau)
    assert taus == sorted(taus)
    assert taus[0] < taus[-1]
    chain = SpeculativeDecoder(target, PlainProposer()).generate(PROMPT, 40, logprobs=2)
    for ours, theirs in zip(result.logprobs, chain.logprobs, strict=True):
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.sampled_logprob == theirs.sampled_logprob


def test_sampled_logprobs_are_those_of_the_targets_sampler(target):
    decoder = SpeculativeDecoder(
        target, TreeProposer(TreeShape(8, 3), make_drafter(target, K), target.head)
    )
    sampler = {"temperature": 0.8, "top_k": 3}
    result = decoder.generate(PROMPT, 30, logprobs=1, seed=4, **sampler)
    ids = torch.tensor([PROMPT + result.tokens])
    logits = target.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1] / 0.8
    best = logits.topk(3).indices
    for row, allowed, one in zip(logits, best, result.logprobs, strict=True):
        expected = row[allowed].log_softmax(0)[allowed.tolist().index(one.token)]
        assert one.sampled_logprob == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_end_of_the_output_and_of_the_context(random_target, count):
    """Paths end before the last position, whatever the tree has room for (fault kind 14)."""
    target = random_target(vocab_size=5, max_position_embeddings=len(PROMPT) + count)
    truth = plain_tokens(target, count)
    request = Request(PROMPT, SamplingSettings(), count)
    run(tree_engine(target, 16, 3), [request])
    assert request.tokens == truth


def test_what_trees_cannot_do_is_refused(target):
    for shape in ((0, 2), (4, 0), (2.5, 2), (4, "2"), (10**6, 2), (4, 10**6)):
        with pytest.raises(ValueError, match="expected whole numbers from 1"):
            TreeShape(*shape)
    with pytest.raises(ValueError, match="tree=16, expected a TreeShape"):
        SpeculativeDecoder.with_drafter(target, make_drafter(target), tree=16)
    with pytest.raises(ValueError, match="tree=16, expected a TreeShape"):
        SpeculativeDecoder.from_pretrained("a drafter", target, tree=16)
    with pytest.raises(ValueError, match="use a fixed policy"):
        Tree([1, 2], parents=[0, 0]).cut(1)
    real = target.forward

    def deaf(ids, **given):
        return real(ids, **given | {"attention_mask": None})

    with (
        mock.patch.object(target, "forward", deaf),
        pytest.raises(ValueError, match="random: Llama"),
    ):
        tree_engine(target)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("mistral", "sdpa"), ("mistral", "eager"), ("gemma3", "sdpa"), ("gemma2", "eager")],
)
def test_trees_across_a_sliding_window(family, attention):
    """Nodes see what the window leaves of context and path (fault kind 19)."""
    model, config, more = FAMILIES[family]
    torch.manual_seed(0)
    config = config(**SMALL, **more)
    config._attn_implementation = attention
    target = Target.wrap(model(config))
    truth = Request(PROMPT, SamplingSettings(), 24)
    run(Engine(target, PlainProposer()), [truth])
    request = Request(PROMPT, SamplingSettings(), 24)
    drafter = make_drafter(target, 4)
    engine = Engine(target, TreeProposer(TreeShape(40, 11), drafter, target.head))
    engine.add([request])
    accepted = 0
    while request.finish_reason is None:
        accepted += engine.step()[0].accepted
        assert audit(engine) < 1e-5
    assert request.tokens == truth.tokens
    assert accepted > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager", GROUPED])
def test_every_attention_of_targets_reads_trees(random_target, attention):
    target = random_target(vocab_size=32)
    target.model.config._attn_implementation = attention
    refuse_without_trees(target)


def test_lookup_and_plain_draft_no_trees(random_target):
    for proposer in ("lookup", "plain"):
        with pytest.raises(ValueError, match="drafts no trees"):
            SpeculativeDecoder.from_pretrained(
                None, random_target(), proposer=proposer, tree=TreeShape()
            )
    target = random_target()
    decoder = SpeculativeDecoder.with_drafter(target, make_drafter(target), tree=TreeShape(6, 2))
    found = decoder.run([decoder.request(prompt, 8) for prompt in PROMPTS[:3]], rows=2)
    alone = [decoder.generate(prompt, 8).tokens for prompt in PROMPTS[:3]]
    assert [result.tokens for result in found] == alone
    assert isinstance(decoder.proposer, TreeProposer)


def test_nodes_that_no_tree_can_have_get_no_room(random_target):
    target = random_target()
    decoder = SpeculativeDecoder.with_drafter(target, make_drafter(target), tree=TreeShape(900, 2))
    assert decoder.proposer.shape == TreeShape(2 + 3 * 2 * 2, 2)
