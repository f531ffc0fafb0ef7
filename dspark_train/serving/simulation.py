"""Load on an engine that is only a cost curve: which policy pays, before anything is built.

Each request walks through the recorded rounds of one conversation, so hard ones stay hard. Its
confidences are the recorded ones, and a draft stands with its exact chance, the recorded overlap.
"""

from dataclasses import dataclass

import numpy as np

from dspark_train.calibration.traces import Traces
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import (
    Drafts,
    FirstDrafts,
    Policy,
    Threshold,
    Waiting,
)
from dspark_train.decoding.scheduler import POLICIES, WITH_COSTS, is_policy


def flat_then_falling(
    largest: int, *, flat: int = 64, cliff: int = 64, jump: float = 0.12, draft: float = 0.12
) -> CostTable:
    """A cost curve of the paper's kind: flat while memory is what a step waits for, then growing
    with the batch, with a jump wherever another tile of `cliff` tokens begins.

    Args:
        largest: tokens.
        flat: up to here a step takes one unit of time and the tiles are free.
        cliff, jump: tokens of a tile, and what one more of them costs.
        draft: what drafting costs at few requests; it grows like the step.
    """
    sizes = np.arange(1, largest + 1)
    beyond = np.maximum(0, sizes - flat)
    seconds = 1.0 + 0.5 * beyond / (4 * flat) + jump * np.ceil(beyond / cliff)
    rows = tuple(range(1, largest // 2 + 1))
    drafting = tuple(float(draft * seconds[row - 1]) for row in rows)
    return CostTable(tuple(sizes.tolist()), (0,), (tuple(seconds.tolist()),), rows, drafting)


@dataclass(frozen=True)
class Simulated:
    """What a policy made of a load.

    Attributes:
        throughput: committed tokens of all requests per second.
        per_user: tokens per second that one request sees.
        verify_length: mean drafts per request and round that entered the target pass.
        drafted: mean drafts that were made.
        verified_per_token: tokens in target passes per committed token.
        tau: committed tokens per request and round.
    """

    throughput: float
    per_user: float
    verify_length: float
    drafted: float
    verified_per_token: float
    tau: float


def policy_of(name: str, costs: CostTable, temperatures: np.ndarray) -> Policy:
    """A policy over arrays, by its name (see `make_scheduler`).

    Raises:
        ValueError: an unknown name.
    """
    if not is_policy(name):
        raise ValueError(f"policy {name}: expected one of {POLICIES}")
    kind, _, number = name.partition(":")
    if kind == "fixed":
        return FirstDrafts(int(number) if number else len(temperatures))
    if kind == "threshold":
        return Threshold(float(number), temperatures)
    return WITH_COSTS[kind](costs, temperatures)


def simulate(
    policy: Policy,
    costs: CostTable,
    traces: Traces,
    *,
    concurrency: int,
    requests: int,
    tokens: int = 128,
    seed: int = 0,
    padded: bool = False,
) -> Simulated:
    """Serve `requests` requests, `concurrency` at a time: who ends is replaced at once.

    Args:
        policy: fresh; it keeps what it learns.
        costs: seconds of a step.
        traces: recorded rounds of full length; they say what is drafted.
        concurrency: R. Time is measured while all of them are there.
        requests: in all, more than `concurrency`.
        tokens: mean length of an output; lengths vary by half of it.
        seed: of the random numbers.
        padded: a pass is as wide as its longest request, in an engine that does not pack rows.

    Raises:
        ValueError: traces without a whole round, or too few requests.
    """
    if requests <= concurrency:
        raise ValueError(f"requests={requests}, expected more than concurrency={concurrency}")
    rows = Rounds(traces)
    random, slots = np.random.default_rng(seed), traces.logits.shape[1]
    # every policy is asked for the same: what a request is must not depend on when it begins
    places = rows.start(random, requests + concurrency)
    sizes = random.integers(tokens // 2, tokens + tokens // 2 + 1, len(places))
    ids = np.arange(concurrency)
    left, place = sizes[:concurrency].copy(), places[:concurrency].copy()
    started, seconds, steps = concurrency, 0.0, 0
    committed = verified = drafted_in_all = 0
    while started < requests:
        limits = np.clip(left - 1, 0, slots)
        drafted, lengths, accepted = play(policy, rows, place, ids, limits, random)
        entering = concurrency * lengths.max() if padded else lengths.sum()
        size = concurrency + int(entering)
        drafting = int(np.count_nonzero(drafted))
        uneven = not padded and lengths.min() < lengths.max()
        seconds += costs.verify_seconds(size)[size] * (costs.uneven if uneven else 1.0)
        seconds += costs.drafting_seconds(drafting)[drafting]
        steps += 1
        committed += int((accepted + 1).sum())
        verified += size
        drafted_in_all += int(drafted.sum())
        left = left - accepted - 1
        place = rows.next(place)
        ended = left <= 0
        fresh = int(ended.sum())
        ids[ended] = started + np.arange(fresh)
        left[ended], place[ended] = sizes[ids[ended]], places[ids[ended]]
        started += fresh
    rounds = steps * concurrency
    return Simulated(
        throughput=committed / seconds,
        per_user=committed / seconds / concurrency,
        verify_length=(verified - rounds) / rounds,
        drafted=drafted_in_all / rounds,
        verified_per_token=verified / committed,
        tau=committed / rounds,
    )


def play(
    policy: Policy,
    rows: "Rounds",
    place: np.ndarray,
    ids: np.ndarray,
    limits: np.ndarray,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One round of R requests at `place` in recorded ones: drafted, verified, accepted, `[R]`."""
    slots = rows.logits.shape[1]
    drafted = policy.draft_lengths(Waiting(ids.tolist(), limits))
    lengths = np.zeros_like(drafted)
    if drafted.any():
        lengths = policy.verify_lengths(Drafts(rows.logits[place], drafted))
    stands = random.random((len(place), slots)) < rows.overlap[place]
    stands &= np.arange(slots) < lengths[:, None]
    accepted = np.logical_and.accumulate(stands, axis=1).sum(1)
    policy.observe(ids.tolist(), np.minimum(accepted + 1, lengths), accepted)
    return drafted, lengths, accepted


class Rounds:
    """Recorded rounds of full length, those of a conversation in a ring."""

    def __init__(self, traces: Traces) -> None:
        whole = traces.where(traces.proposed == traces.logits.shape[1])
        if not len(whole):
            raise ValueError(
                f"{len(traces)} traced rounds, none of them with all {traces.logits.shape[1]} "
                "drafts verified: trace without a scheduler, and longer outputs"
            )
        order = whole.conversation.argsort(stable=True).numpy()
        self.logits, self.overlap = whole.logits.numpy()[order], whole.overlap.numpy()[order]
        _, self.first, count = np.unique(
            whole.conversation.numpy()[order], return_index=True, return_counts=True
        )
        self.following = np.arange(1, len(order) + 1)
        self.following[self.first + count - 1] = self.first
        self.count = count

    def start(self, random: np.random.Generator, requests: int) -> np.ndarray:
        """Places in random conversations."""
        chosen = random.integers(0, len(self.first), requests)
        return self.first[chosen] + (random.random(requests) * self.count[chosen]).astype(int)

    def next(self, place: np.ndarray) -> np.ndarray:
        return self.following[place]
