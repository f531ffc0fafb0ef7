"""The exact joint output distribution of several requests under a policy, by enumeration.

A world of tiny tables stands in for the models: what the target and the drafter say depends on all
tokens before, and the confidence of a slot on the tokens drafted before it. Every draft and every
verdict is followed with its probability; policies, acceptance and residual are the real ones.
"""

import copy
import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dspark_train.decoding.policies import Drafts, DraftsAll, Policy, Waiting
from dspark_train.decoding.verify import residual

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class World:
    """Random tables: every history has its own row.

    Attributes:
        vocabulary, slots: sizes.
        sharp: spread of the logits of both models.
        confident: spread of the confidence logits; they change sign with the token before.
    """

    vocabulary: int = 2
    slots: int = 2
    sharp: float = 1.0
    confident: float = 3.0

    def target(self, request: int, tokens: Tokens) -> np.ndarray:
        return self._row("target", request, tokens)

    def draft(self, request: int, committed: int, tokens: Tokens) -> np.ndarray:
        return self._row("draft", request, committed, tokens)

    def confidence(self, request: int, committed: int, tokens: Tokens) -> float:
        """Logit of the next draft after `tokens`, of which `committed` are committed."""
        random = self._random("confidence", request, committed, tokens[:-1])
        token = tokens[-1] if tokens else 0
        return self.confident * (random.uniform(0.3, 1.0) * (1 if token else -1) + 0.4)

    def _row(self, *key: object) -> np.ndarray:
        logits = self._random(*key).normal(0, self.sharp, self.vocabulary)
        return np.exp(logits) / np.exp(logits).sum()

    def _random(self, *key: object) -> np.random.Generator:
        return np.random.default_rng(list(pickle.dumps(key)))


def expected(world: World, requests: int, length: int) -> dict[tuple[Tokens, ...], float]:
    """What the target alone gives: the product of its chains."""
    chains = [
        [(tokens, _chain(world, r, tokens)) for tokens in _sequences(world, length)]
        for r in range(requests)
    ]
    return {
        tuple(tokens for tokens, _ in joint): float(np.prod([p for _, p in joint]))
        for joint in itertools.product(*chains)
    }


def found(
    world: World, policy: Policy, requests: int, length: int, *, keyed: bool = False
) -> dict[tuple[Tokens, ...], float]:
    """What rounds under `policy` give for `length` tokens of every request.

    Args:
        keyed: a draft that was discarded comes again when its position is drafted anew, as if
            both were drawn with one number. Wants drafts that do not depend on their context.
    """
    results: dict[tuple[Tokens, ...], float] = defaultdict(float)
    frontier = {b"": (1.0, ((),) * requests, policy, {})}
    while frontier:
        following: dict[bytes, tuple] = {}
        for weight, state, before, again in frontier.values():
            for share, new, after, left in _round(world, before, state, length, again):
                if all(len(tokens) == length for tokens in new):
                    results[new] += weight * share
                    continue
                left = left if keyed else {}
                key = pickle.dumps((new, sorted(left.items()), _memory(after)))
                total = following[key][0] if key in following else 0.0
                following[key] = (total + weight * share, new, after, left)
        frontier = following
    return results


def error(world: World, policy: Policy, requests: int, length: int, **rest: bool) -> float:
    """Largest difference of a joint probability."""
    ours, theirs = found(world, policy, requests, length, **rest), expected(world, requests, length)
    assert set(ours) <= set(theirs)
    return max(abs(ours.get(tokens, 0.0) - p) for tokens, p in theirs.items())


def _memory(policy: Policy) -> bytes:
    return pickle.dumps(policy)


def _round(
    world: World, before: Policy, state: tuple[Tokens, ...], length: int, again: dict
) -> Iterator[tuple[float, tuple[Tokens, ...], Policy, dict]]:
    """Everything that one round may do."""
    live = [r for r, tokens in enumerate(state) if len(tokens) < length]
    limits = np.array([min(world.slots, length - len(state[r]) - 1) for r in live])
    policy = copy.deepcopy(before)
    drafting = policy.draft_lengths(Waiting(live, limits))
    assert (drafting <= limits).all()
    options = [
        list(_drafts(world, r, state[r], int(n), again))
        for r, n in zip(live, drafting, strict=True)
    ]
    for joint in itertools.product(*options):
        logits = np.zeros((len(live), world.slots), dtype=np.float32)
        for i, (r, (drafted, _)) in enumerate(zip(live, joint, strict=True)):
            for k in range(len(drafted)):
                tokens = (*state[r], *drafted[:k])
                logits[i, k] = world.confidence(r, len(state[r]), tokens)
        decided = copy.deepcopy(policy)
        lengths = decided.verify_lengths(Drafts(logits, drafting))
        assert (lengths <= drafting).all()
        assert (lengths >= 0).all()
        verdicts = [
            list(_verdicts(world, r, state[r], drafted, int(n)))
            for r, (drafted, _), n in zip(live, joint, lengths, strict=True)
        ]
        drawn = float(np.prod([p for _, p in joint]))
        for outcome in itertools.product(*verdicts):
            after = decided
            if type(decided).observe is not DraftsAll.observe:
                after = copy.deepcopy(decided)
                judged = np.array([judged for _, _, judged, _ in outcome])
                after.observe(live, judged, np.array([accepted for *_, accepted in outcome]))
            new = list(state)
            left = {}
            for r, (drafted, _), (tokens, *_) in zip(live, joint, outcome, strict=True):
                new[r] = (*state[r], *tokens)
                for position in range(len(tokens), len(drafted)):
                    left[r, len(state[r]) + position] = drafted[position]
            share = drawn * float(np.prod([p for _, p, _, _ in outcome]))
            if share:
                yield share, tuple(new), after, left


def _drafts(
    world: World, r: int, committed: Tokens, count: int, again: dict
) -> Iterator[tuple[Tokens, float]]:
    for drafted in itertools.product(range(world.vocabulary), repeat=count):
        p = 1.0
        for k, token in enumerate(drafted):
            place = (r, len(committed) + k)
            if place in again:
                p *= float(again[place] == token)
            else:
                p *= world.draft(r, len(committed), (*committed, *drafted[:k]))[token]
        if p:
            yield drafted, p


def _verdicts(
    world: World, r: int, committed: Tokens, drafted: Tokens, length: int
) -> Iterator[tuple[Tokens, float, int, int]]:
    """Committed tokens, probability, drafts judged and accepted."""
    reach = 1.0
    for k in range(length):
        tokens = (*committed, *drafted[:k])
        target, draft = world.target(r, tokens), world.draft(r, len(committed), tokens)
        token = drafted[k]
        accept = min(1.0, target[token] / draft[token])
        rest = residual(torch.from_numpy(target), torch.from_numpy(draft), token).numpy()
        for other in range(world.vocabulary):
            yield (*drafted[:k], other), reach * (1 - accept) * rest[other], k + 1, k
        reach *= accept
    bonus = world.target(r, (*committed, *drafted[:length]))
    for other in range(world.vocabulary):
        yield (*drafted[:length], other), reach * bonus[other], length, length


def _sequences(world: World, length: int) -> Iterator[Tokens]:
    return itertools.product(range(world.vocabulary), repeat=length)


def _chain(world: World, r: int, tokens: Tokens) -> float:
    rows = [world.target(r, tokens[:i])[token] for i, token in enumerate(tokens)]
    return float(np.prod(rows))
