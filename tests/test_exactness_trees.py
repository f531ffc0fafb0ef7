"""Law 5 for trees: the enumerated output distribution is the target's (fault kind 8)."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from dspark_train.decoding import engine as engine_module
from dspark_train.decoding import tree_pass as tree_pass_module
from dspark_train.decoding import tree_verify as tree_verify_module
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import TreeProposer, TreeShape
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target
from tests import test_exactness_processors as with_processors
from tests.open_numbers import Explorer, Open
from tests.random_drafter import make_drafter
from tests.test_exactness import CONVENTIONS, SAMPLERS, greatest_error

TOLERANCE = 3e-6
CERTAIN = SamplingSettings(0.0)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tree_engine(random_target: Callable[..., Target]) -> Callable[..., Engine]:
    """Make an engine of a random target and a random drafter of trees."""

    def make(
        nodes: int = 3,
        branches: int = 2,
        convention: str = "dspark",
        head: str | None = "vanilla",
        vocab_size: int = 3,
        sampler: SamplingSettings | None = None,
        seed: int = 1,
        **drafter_config: object,
    ) -> Engine:
        target = random_target(vocab_size=vocab_size, num_layers=2)
        drafter = make_drafter(target, *CONVENTIONS[convention], head, seed, **drafter_config)
        shape = TreeShape(nodes, branches)
        proposer = TreeProposer(shape, drafter, target.head, vocab_size, sampler=sampler)
        return Engine(target, proposer, vocab_size)

    return make


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        ("greedy", {"nodes": 5, "branches": 3, "vocab_size": 4}),
        ("T=1", {"nodes": 3}),
        ("T=0.7", {"nodes": 1, "head": "rnn", "convention": "dflash"}),
        ("top-k", {"nodes": 5, "head": "gated"}),
        ("top-p", {"nodes": 4, "head": None, "enable_confidence_head": False}),
        ("combined", {"nodes": 4, "branches": 3, "vocab_size": 4}),
        ("T=1", {"draft_ids": [0, 2], "nodes": 4}),
    ],
)
def test_drawn_trees_are_lossless(tree_engine, sampler, settings):
    """Children are drawn without replacement from the drafter under the target's sampler."""
    assert greatest_error(tree_engine(**settings), SAMPLERS[sampler]) < TOLERANCE


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_top_k": 2}


@pytest.mark.parametrize(
    ("head", "convention", "sampler"),
    [
        ("vanilla", "dspark", "T=1"),
        ("rnn", "dflash", "combined"),
        ("selector", "dflash", "T=1"),
        (None, "dspark", "top-p"),
    ],
)
def test_trees_of_the_best_candidates_are_lossless(tree_engine, head, convention, sampler):
    """Nothing is drawn: the drafter is certain of every child, however unlikely it holds it."""
    engine = tree_engine(
        5, 3, convention, head, 4, CERTAIN, **(SELECTOR if head == "selector" else {})
    )
    assert greatest_error(engine, SAMPLERS[sampler]) < TOLERANCE


@pytest.mark.parametrize(
    ("sampler", "drafts"),
    [("all", None), ("greedy", None), ("own", CERTAIN), ("presence and frequency", CERTAIN)],
)
def test_trees_with_processors_are_lossless(tree_engine, sampler, drafts):
    """Every node sees the tokens of its own path, not those of other branches."""
    engine = tree_engine(3, 2, vocab_size=with_processors.VOCABULARY, sampler=drafts)
    settings = with_processors.SAMPLERS[sampler]
    assert with_processors.greatest_error(engine, settings) < TOLERANCE


def everything_before(parents: list[int], width: int) -> list[list[bool]]:
    return [[j <= i for j in range(width)] for i in range(width)]


def nodes_as_a_chain(engine: Engine):
    """Positions by the number of a node for its depth."""
    real = engine.target.forward

    def forward(ids: torch.Tensor, *, position_ids: torch.Tensor, **rest: object):
        in_order = position_ids[:, :1] + torch.arange(ids.shape[1])
        return real(ids, position_ids=in_order, **rest)

    return mock.patch.object(engine.target, "forward", forward)


def anticipates(engine: Engine):
    """A draft that was drawn pushes itself out of the tree."""
    real = engine.proposer.propose

    def propose(*given):
        trees = real(*given)
        return [
            replace(tree, tokens=tree.tokens[:-1], parents=tree.parents[:-1])
            if tree.tokens and tree.tokens[-1] == 0
            else tree
            for tree in trees
        ]

    return mock.patch.object(engine.proposer, "propose", propose)


def by_their_probabilities(engine: Engine):
    """The best candidates are judged as if they had been drawn."""
    real, rows = engine.proposer.propose, torch.full((3,), 1 / 3)

    def propose(*given):
        return [
            replace(tree, draft_rows={node: rows for node in {*tree.parents}})
            for tree in real(*given)
        ]

    return mock.patch.object(engine.proposer, "propose", propose)


def shifted_rows(engine: Engine):
    real = engine.decide

    def decide(requests, logits, trees):
        return real(requests, logits.roll(1, 0), trees)

    return mock.patch.object(engine, "decide", decide)


FAULTS = {
    "the residual stays that of the first sibling": (
        None,
        lambda engine: mock.patch.object(tree_verify_module, "residual", lambda row, *_: row),
    ),
    "the draft's distribution keeps rejected siblings": (
        None,
        lambda engine: mock.patch.object(tree_verify_module, "without", lambda row, _: row),
    ),
    "siblings share a number": (
        CERTAIN,
        lambda engine: mock.patch.object(
            Explorer, "uniform", lambda self, position, purpose, branch=0: Open((position, purpose))
        ),
    ),
    "a draft's chance knows the draft": (None, anticipates),
    "the best candidates are judged as draws": (CERTAIN, by_their_probabilities),
    "nodes see other branches": (
        CERTAIN,
        lambda engine: mock.patch.object(tree_pass_module, "ancestors", everything_before),
    ),
    "positions by node": (CERTAIN, nodes_as_a_chain),
    "rows of the node before": (CERTAIN, shifted_rows),
    "the path is not moved": (
        CERTAIN,
        lambda engine: mock.patch.object(
            engine_module, "straighten", lambda cache, output, paths: output
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_tree_faults_are_found(tree_engine, fault):
    drafts, plant = FAULTS[fault]
    nodes = 1 if plant is anticipates else 3
    engine = tree_engine(nodes, 2, sampler=drafts)
    with plant(engine):
        assert greatest_error(engine, SAMPLERS["T=1" if drafts else "top-k"]) > 1e-3
