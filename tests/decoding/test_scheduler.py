"""Policies as schedulers of the engine: named, given what they need, and exact by enumeration."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from dspark_train.decoding.auto import Auto
from dspark_train.decoding.columns import Columns
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.policies import Capacity, Prefix, Threshold
from dspark_train.decoding.proposers import BlockProposer, LookupProposer, Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Fixed, Scheduled, is_policy, make_scheduler
from dspark_train.decoding.stats import Round
from dspark_train.decoding.survival import fill
from tests.calibration.planted import planted_traces
from tests.open_numbers import Open
from tests.random_drafter import make_drafter
from tests.test_exactness import TOLERANCE, greatest_error

ONES = [1.0, 1.0]
FLAT = CostTable.from_steps_per_second((1.0,) * 12)
# one or two drafts cost more than they bring, unless confidences say that both are good
VALLEY = CostTable.from_steps_per_second((1.0, 0.5, 0.45))


class Retrospective(Prefix):
    """Unlawful: the best number of extensions for live confidences."""

    def admit(self, live, ranking, drafts):
        return fill(live, ranking, int(self.theta(ranking, drafts).argmax()))


def engine(random_target, policy, slots: int = 2, vocab_size: int = 4) -> Engine:
    """Drafts with confidences that change sign with the token before."""
    target = random_target(vocab_size=vocab_size, num_layers=2)
    drafter = make_drafter(target, slots, True, "vanilla")
    weight = drafter.confidence_head.proj.weight.data
    weight[:, : target.hidden_size] = 0
    weight[:, target.hidden_size :] *= 50
    proposer = BlockProposer(drafter, target.head, vocab_size)
    return Engine(target, proposer, vocab_size, scheduler=Scheduled(policy, slots))


@pytest.mark.parametrize("sampler", [SamplingSettings(1.0), SamplingSettings(0.7, top_k=3)])
@pytest.mark.parametrize("policy", [Threshold(0.5, ONES), Prefix(FLAT, ONES), Prefix(VALLEY, ONES)])
def test_the_engine_is_lossless_under_policies_without_memory(random_target, policy, sampler):
    assert greatest_error(engine(random_target, policy), sampler) < TOLERANCE


def test_the_engine_under_an_unlawful_policy_is_found(random_target):
    unlawful = Retrospective(VALLEY, ONES)
    assert greatest_error(engine(random_target, unlawful), SamplingSettings(1.0)) > 1e-3


# all three drafts or none, by how sure the last one of an earlier round was
STEEP = CostTable.from_steps_per_second((1, 0.5, 0.33, 0.32))
REMEMBERING = {
    "capacity": lambda: Capacity(STEEP, [1.0] * 3, lag=1),
    "columns": lambda: Columns(STEEP, [1.0] * 3),
    "auto": lambda: Auto(STEEP, [1.0] * 3, lag=1),
}


@pytest.mark.parametrize("policy", REMEMBERING)
def test_the_engine_is_lossless_under_policies_with_memory(random_target, policy):
    one = engine(random_target, REMEMBERING[policy](), 3, 2)
    assert greatest_error(one, SamplingSettings(1.0), 5, [1, 0]) < TOLERANCE


def test_memory_is_unlawful_where_drafts_share_their_numbers(random_target):
    """What was drafted and discarded comes again in its place: old confidences look ahead."""
    one = engine(random_target, REMEMBERING["capacity"](), 3, 2)
    shared = mock.patch(
        "tests.open_numbers.Explorer.proposing",
        lambda self, position, anchor, branch=0: Open((position, "drafted")),
    )
    with shared:
        assert greatest_error(one, SamplingSettings(1.0), 5, [1, 0]) > 1e-3


@pytest.mark.parametrize(
    "name", ["fixed", "fixed:1", "threshold:0.6", "prefix", "capacity", "columns", "auto"]
)
def test_greedy_output_does_not_depend_on_the_policy(random_target, name):
    target = random_target(vocab_size=5, seed=3)
    prompts = [[1, 2, 3], [4], [0, 0, 1, 2]]

    def outputs(scheduler, rows):
        proposer = BlockProposer(make_drafter(target, 4), target.head)
        batch = [Request(prompt, SamplingSettings(), 20) for prompt in prompts]
        one = Engine(target, proposer, rows=rows, scheduler=scheduler)
        one.add(batch)
        while one.requests:
            one.step()
            one.take_finished()
        return [request.new_tokens for request in batch]

    costs = CostTable.from_steps_per_second((1.0, 1.0, 0.9, 0.8, 0.7, 0.4, 0.39, 0.38, 0.2))
    scheduler = make_scheduler(name, 4, costs, [1.0, 0.7, 2.0, 1.0])
    assert outputs(scheduler, 3) == outputs(Fixed(0), 3)


def test_names() -> None:
    assert make_scheduler("fixed:3", 7).length == 3
    assert make_scheduler("fixed", 7).length is None
    kinds = {"prefix": Prefix, "capacity": Capacity, "auto": Columns}
    assert isinstance(make_scheduler("auto", 2, FLAT, padded=False).policy, Auto)
    for name, kind in kinds.items():
        assert isinstance(make_scheduler(name, 2, FLAT).policy, kind)
    for name in ("fixed:x", "fixed:-1", "threshold:2", "threshold", "best", "auto:3"):
        with pytest.raises(ValueError, match=f"policy {name}"):
            make_scheduler(name, 2, FLAT)
    with pytest.raises(ValueError, match="needs a cost table"):
        make_scheduler("prefix", 2)


def test_proposals_of_any_length_reach_the_policy() -> None:
    requests = [Request([1, 2], SamplingSettings(), limit) for limit in (20, 2, 1)]
    scheduler = Scheduled(Prefix(FLAT, [1.0] * 3), 3)
    assert scheduler.limits(requests) == [3, 1, 0]
    given = [
        Proposal([1, 2, 3], None, torch.tensor([3.0, 3.0, 3.0])),
        Proposal([1], None, torch.tensor([3.0])),
        Proposal(),
    ]
    assert scheduler.schedule(requests, given) == [3, 1, 0]
    assert scheduler.schedule(requests, [Proposal()] * 3) == [0, 0, 0]


def test_a_proposer_without_confidences_is_refused_where_they_are_needed(random_target) -> None:
    target = random_target()
    one = Engine(target, LookupProposer(3, shortest=1), scheduler=make_scheduler("prefix", 3, FLAT))
    one.add([Request([1, 2, 1, 2, 1], SamplingSettings(), 9)])
    with pytest.raises(ValueError, match="policy prefix needs confidences"):
        one.step()


@pytest.mark.parametrize("name", ["threshold:0.5", "prefix", "capacity", "columns"])
def test_temperatures_follow_what_is_served(name, caplog) -> None:
    """Confidences that promise too much: it is said, and the policy reads other temperatures."""
    scheduler = make_scheduler(name, 3, FLAT, [1.0] * 3, watch=True)
    traces = planted_traces([3.0] * 3, 3000, seed=4)
    requests = [Request([1, 2], SamplingSettings(), 90) for _ in range(2)]
    for logits, accepted in zip(traces.logits.tolist(), traces.accepted.tolist(), strict=True):
        one = Round(3, accepted, min(accepted + 1, 3), accepted + 1, logits)
        scheduler.observe(requests, [one, one])
    assert "calibration has drifted for served requests" in caplog.text
    policy = scheduler.policy
    read = policy.prefix.temperatures if name == "capacity" else policy.temperatures
    assert read.tolist() == pytest.approx([3.0] * 3, rel=0.35)


def test_a_shift_of_what_is_served_is_followed() -> None:
    """Confidences that are off by a number: what the policy is told is put right."""
    scheduler = make_scheduler("prefix", 3, FLAT, [1.0] * 3, watch=True)
    traces = planted_traces([1.0] * 3, 4000, seed=4, shift=-1.0)
    requests = [Request([1, 2], SamplingSettings(), 90)]
    for logits, accepted in zip(traces.logits.tolist(), traces.accepted.tolist(), strict=True):
        one = Round(3, accepted, min(accepted + 1, 3), accepted + 1, logits)
        scheduler.observe(requests, [one])
    told = []
    scheduler.policy.verify_lengths = lambda drafts: told.append(drafts.confidence) or np.ones(1)
    scheduler.schedule(requests, [Proposal([5, 6], confidence=torch.tensor([0.5, -2.0]))])
    assert told[0] == pytest.approx(np.array([[-0.5, -3.0]]), abs=0.25)


def test_only_auto_is_told_what_unequal_passes_cost() -> None:
    """To others it is part of what sizes cost."""
    table = CostTable.from_steps_per_second((1.0,) * 12)
    table = replace(table, uneven=1.4)
    for name, expected in (("prefix", 1.0), ("capacity", 1.0), ("columns", 1.0), ("auto", 1.4)):
        made = make_scheduler(name, 2, table, padded=False, follow=True)
        assert made.costs.table.uneven == expected


def test_nobody_watches_unasked() -> None:
    assert make_scheduler("prefix", 3, FLAT).monitor is None


def test_names_of_policies() -> None:
    for name in ("fixed", "fixed:0", "fixed:12", "threshold:0.6", "threshold:1", "columns", "auto"):
        assert is_policy(name), name
    wrong = ["", "best", "fixed:", "fixed:-1", "fixed:²", "fixed:x", "threshold", "threshold:x"]
    for name in (*wrong, "threshold:1.5", "threshold:nan", "prefix:3", "auto:"):
        assert not is_policy(name), name
        with pytest.raises(ValueError, match=f"policy {name}: expected one of fixed"):
            make_scheduler(name, 3)
