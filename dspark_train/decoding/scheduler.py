"""How many drafts of each request enter the target pass.

A round asks twice: before drafting, how many tokens each request may draft, and after drafting,
how many of them are verified. Exactness needs *non-anticipation*: whether draft k of a request is
verified may depend on everything before it, but neither on draft k itself nor on what follows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dspark_train.calibration.drift import DriftMonitor
from dspark_train.calibration.scaling import Scaling
from dspark_train.decoding.auto import Auto
from dspark_train.decoding.columns import Columns
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import (
    Capacity,
    Drafts,
    Policy,
    Prefix,
    Threshold,
    Waiting,
)
from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.running_costs import RunningCosts
from dspark_train.decoding.stats import Round, Seconds

WITH_COSTS = {"prefix": Prefix, "capacity": Capacity, "columns": Columns, "auto": Auto}
POLICIES = ", ".join(("fixed", "fixed:LENGTH", "threshold:PROBABILITY", *WITH_COSTS))


class Scheduler(Protocol):
    """A policy. Lists are in the order of the requests; one entry a request."""

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that each request may draft in this round, 0 for none.

        The engine lowers them to what a request can still commit.
        """

    def schedule(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        """Verify lengths: how many leading drafts of each proposal enter the target pass."""

    def observe(self, requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        """What became of the round that was scheduled last."""


class Fixed:
    """The same verify length for every request in every round.

    Args:
        length: drafts that are made and verified; None verifies all that the proposer drafts.

    Raises:
        ValueError: a negative length.
    """

    def __init__(self, length: int | None = None) -> None:
        if length is not None and length < 0:
            raise ValueError(f"length={length}, expected 0 or more, or None for whole proposals")
        self.length = length

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return [request.remaining if self.length is None else self.length for request in requests]

    def schedule(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens) for proposal in proposals]

    def observe(self, requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        pass


class Scheduled:
    """A policy over arrays as the scheduler of an engine. One serves one engine.

    Args:
        policy: decides.
        slots: K, drafts of a proposal at most.
        temperatures: `[K]` that the policy reads; written to when calibration is found to drift.
            None: nobody watches.
        costs: of the policy, which it is told of as rounds correct them. None: they stay.
    """

    def __init__(
        self,
        policy: Policy,
        slots: int,
        temperatures: np.ndarray | None = None,
        costs: RunningCosts | None = None,
    ) -> None:
        self.policy, self.slots, self.temperatures = policy, slots, temperatures
        self.costs, self.drafted = costs, np.zeros(0, dtype=np.int64)
        self.monitor, self.turn, self.shifts = None, 0, np.zeros(slots, dtype=np.float32)
        if temperatures is not None:
            self.monitor = DriftMonitor(Scaling.of(torch.from_numpy(temperatures.copy())))

    def limits(self, requests: Sequence[Request]) -> list[int]:
        room = np.clip([request.remaining - 1 for request in requests], 0, self.slots)
        waiting = Waiting([id(request) for request in requests], room, _context(requests))
        lengths = self.policy.draft_lengths(waiting)
        trial = None if self.costs is None else self.costs.trial(self.turn, self.slots)
        return (lengths if trial is None else np.minimum(lengths, trial)).tolist()

    def schedule(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> list[int]:
        self.drafted = drafted = np.array([len(proposal.tokens) for proposal in proposals])
        if not drafted.any():
            return drafted.tolist()
        logits = _confidences(proposals)
        if logits is not None:
            logits = logits + self.shifts[: logits.shape[1]]
        return self.policy.verify_lengths(Drafts(logits, drafted, _context(requests))).tolist()

    def observe(self, requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        self.turn += 1
        ids = [id(request) for request in requests]
        judged = np.array([one.judged for one in rounds])
        self.policy.observe(ids, judged, np.array([one.accepted for one in rounds]))
        if self.monitor is not None:
            self._watch(rounds)
        if self.costs is not None:
            self._time(requests, rounds, self.costs)

    def _time(
        self, requests: Sequence[Request], rounds: Sequence[Round], costs: RunningCosts
    ) -> None:
        """Correct the costs by what the round took."""
        parts = zip(*(one.seconds for one in rounds), strict=True)
        took = Seconds(*map(sum, parts))
        drafting, count = took.draft + took.walk, np.count_nonzero(self.drafted)
        if count:
            costs.observe_drafting(count, int(self.drafted.max()), self.slots, drafting)
        # who drafts nothing still pays for reading what the target says
        rest = sum(took) - (drafting if count else 0.0)
        read = [one.proposed + 1 for one in rounds]
        costs.observe(sum(read), _context(requests), rest, min(read) < max(read))
        if costs.due():
            self.policy.price(costs.corrected())

    def _watch(self, rounds: Sequence[Round]) -> None:
        """Look at one request of the round, another one every time: enough, and cheap."""
        one = rounds[self.turn % len(rounds)]
        if one.confidence:
            logits = torch.zeros(self.slots)
            logits[: len(one.confidence)] = torch.tensor(one.confidence)
            self.monitor.observe("served requests", logits, one.accepted, one.known)
            scaling = self.monitor.scaling("served requests")
            self.shifts[:] = scaling.shifts.numpy()
            self.temperatures[:] = scaling.temperatures.numpy()


def is_policy(name: str) -> bool:
    """Whether a scheduler can be made by that name."""
    kind, colon, number = name.partition(":")
    if kind == "fixed" and colon:
        return number.isascii() and number.isdecimal()
    if kind == "threshold":
        try:
            return 0 <= float(number) <= 1
        except ValueError:
            return False
    return not colon and (kind == "fixed" or kind in WITH_COSTS)


def make_scheduler(
    name: str,
    slots: int,
    costs: CostTable | None = None,
    temperatures: Sequence[float] | None = None,
    *,
    padded: bool = True,
    watch: bool = False,
    follow: bool = False,
) -> Scheduler:
    """A scheduler by name: fixed, fixed:3, threshold:0.6, prefix, capacity, columns or auto.

    Args:
        name: with its number where it has one.
        slots: K, drafts of a proposal at most.
        costs: for prefix, capacity and auto.
        temperatures: `[K]` from calibration; None: 1.
        padded: passes are as wide as their longest request (the target does not `packs_rows`);
            then auto is columns, else `Auto`.
        watch: warn when calibration drifts, and fit shifts and temperatures anew on what is served.
        follow: correct `costs` by what rounds really take.

    Raises:
        ValueError: an unknown name, a number out of range, or no cost table where it is needed.
    """
    if not is_policy(name):
        raise ValueError(f"policy {name}: expected one of {POLICIES}")
    kind, _, number = name.partition(":")
    if padded and name == "auto":
        kind = "columns"
    scale = np.array([1.0] * slots if temperatures is None else temperatures, dtype=np.float64)
    watched = scale if watch else None
    if kind == "fixed":
        return Fixed(int(number) if number else None)
    if kind == "threshold":
        return Scheduled(Threshold(float(number), scale), slots, watched)
    if costs is None:
        raise ValueError(f"policy {name} needs a cost table: measure one, or give a file")
    if kind != "auto":  # others do not ask how unequal a pass is: it is part of what sizes cost
        costs = replace(costs, uneven=1.0)
    running = RunningCosts(costs) if follow else None
    return Scheduled(WITH_COSTS[kind](costs, scale), slots, watched, running)


def _context(requests: Sequence[Request]) -> float:
    """Mean context length."""
    return sum(len(request.tokens) for request in requests) / len(requests)


def _confidences(proposals: Sequence[Proposal]) -> np.ndarray | None:
    """Logits `[R, K]`, None where a proposal has none."""
    given = [proposal.confidence for proposal in proposals if proposal.tokens]
    if any(logits is None for logits in given):
        return None
    empty = given[0][:0]
    rows = [proposal.confidence if proposal.tokens else empty for proposal in proposals]
    return pad_sequence(rows, batch_first=True).float().cpu().numpy()
