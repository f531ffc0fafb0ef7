"""The exact law of one round: what the next token is, integrated over all random numbers.

Every draft that the proposer can make is made (few tokens are allowed, so they can be counted),
the target judges each in its one pass, and the real decision is followed over every number that it
may get. A decision is a step function of each number, so the integral is a sum of lengths.

If after every prefix that a round commits the next token has the target's distribution, then the
whole output has it, by induction over rounds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import warp

_TOP = 1 - 2.0**-53
_PRECISION = 1e-7


@dataclass(frozen=True)
class RoundLaw:
    """What was found.

    Attributes:
        error: largest difference of a probability of the next token, after any prefix of the round.
        pass_error: largest difference between the target's probabilities in the round's pass and
            in fresh passes without a cache; rounding only.
        prefixes, proposals: how many were followed.
        drafts: in the longest proposal.
    """

    error: float
    pass_error: float
    prefixes: int
    proposals: int
    drafts: int


class _Script:
    """Stands in for `Randomness`: numbers by purpose and place, 0.5 where none is set."""

    def __init__(self, anchor: int) -> None:
        self.first = anchor + 1
        self.drafts: list[float] = []
        self.accept: list[float] = []
        self.resample = 0.5

    def proposing(self, position: int, anchor: int, branch: int = 0) -> float:
        slot = position - self.first
        return self.drafts[slot] if slot < len(self.drafts) else 0.5

    def uniform(self, position: int, purpose: str) -> float:
        return self.accept[position - self.first] if purpose == "accept" else self.resample


@torch.inference_mode()
def round_law(engine: Engine, request: Request, length: int) -> RoundLaw:
    """The law of a round of at most `length` drafts, for the only request of `engine`.

    The request's settings should allow few tokens: the work grows with their number to the power
    of `length`. Nothing is committed; afterwards the request is only good to be removed.

    Raises:
        ValueError: a draft that is not a draw from the distribution it is recorded with.
    """
    script = request.randomness = _Script(len(request.tokens) - 1)
    nodes: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    targets: dict[tuple[int, ...], torch.Tensor] = {}
    proposals, drafts = 0, 0
    for weight, proposal in _proposals(engine, request, script, length):
        logits, _ = engine.verify([proposal])
        engine.cache.truncate([len(request.tokens) - 1])
        rows = warp(request.process(logits, proposal.tokens), request.settings)
        for i in range(len(rows)):
            targets.setdefault(tuple(proposal.tokens[:i]), rows[i])
        for share, tokens in _outcomes(engine, request, script, proposal, logits):
            for i, token in enumerate(tokens):
                nodes[tuple(tokens[:i])][token] += weight * share
        proposals, drafts = proposals + 1, max(drafts, len(proposal.tokens))
    error, pass_error = 0.0, 0.0
    for prefix, reached in nodes.items():
        if prefix not in targets:
            continue  # the token after the last draft: its row is that of the next round
        found = torch.zeros_like(targets[prefix])
        for token, mass in reached.items():
            found[token] = mass / sum(reached.values())
        error = max(error, float((found - targets[prefix]).abs().max()))
        fresh = _fresh(engine, request, prefix)
        pass_error = max(pass_error, float((fresh - targets[prefix]).abs().max()))
    return RoundLaw(error, pass_error, len(nodes), proposals, drafts)


def _proposals(
    engine: Engine, request: Request, script: _Script, length: int
) -> Iterator[tuple[float, Proposal]]:
    """Every proposal with its probability."""

    def follow(numbers: list[float], weight: float) -> Iterator[tuple[float, Proposal]]:
        script.drafts = numbers
        (proposal,) = engine.proposer.propose([request], [length])
        if proposal.probs is None or len(numbers) == len(proposal.tokens):
            yield weight, proposal
            return
        row = proposal.probs[len(numbers)].double()
        upper = row.cumsum(0) / row.sum()
        for token in row.nonzero()[:, 0].tolist():
            share = float(row[token] / row.sum())
            inside = float(upper[token]) - share / 2
            for below, found in follow([*numbers, inside], weight * share):
                if found.tokens[len(numbers)] != token:
                    raise ValueError(
                        f"draft {found.tokens[len(numbers)]} at slot {len(numbers)} is not the "
                        f"draw from its recorded distribution at {inside}, which is {token}"
                    )
                yield below, found

    yield from follow([], 1.0)


def _outcomes(
    engine: Engine, request: Request, script: _Script, proposal: Proposal, logits: torch.Tensor
) -> Iterator[tuple[float, list[int]]]:
    """Every list of tokens that the decision on `proposal` may commit, with its probability."""
    L = len(proposal.tokens)

    def decided() -> list[int]:
        return engine.decide([request], logits, [proposal])[0].tokens

    def accepts(slot: int, u: float) -> bool:
        script.accept = [*passed[:slot], u, *[_TOP] * (L - slot - 1)]
        return engine.decide([request], logits, [proposal])[0].accepted > slot

    passed: list[float] = []
    reached = 1.0
    for slot in range(L + 1):
        chance = 0.0
        if slot < L:
            chance = _step(lambda u, slot=slot: not accepts(slot, u))
            script.accept = [*passed, (1 + chance) / 2, *[_TOP] * (L - slot - 1)]
        else:
            script.accept = list(passed)
        stops = reached * (1 - chance)
        if stops > 0:
            for share, u in _pieces(lambda u: _at(script, u, decided)[-1]):
                yield stops * share, _at(script, u, decided)
        reached *= chance
        if reached == 0:
            return
        passed.append(chance / 2)


def _at(script: _Script, u: float, decided: Callable[[], list[int]]) -> list[int]:
    script.resample = u
    return decided()


def _step(after: Callable[[float], bool]) -> float:
    """Where a monotone condition on [0, 1) begins to hold; 1 if nowhere."""
    if after(0.0):
        return 0.0
    if not after(_TOP):
        return 1.0
    low, high = 0.0, _TOP
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if after(middle) else (middle, high)
    return high  # it holds there


def _pieces(value: Callable[[float], int]) -> Iterator[tuple[float, float]]:
    """Lengths of the pieces of a step function on [0, 1), and a number inside each."""
    left, last = 0.0, value(_TOP)
    while (here := value(left)) != last:
        border = _step(lambda u, here=here, left=left: u > left and value(u) != here)
        yield border - left, (left + border) / 2
        left = border
    yield 1 - left, (left + 1) / 2


def _fresh(engine: Engine, request: Request, prefix: tuple[int, ...]) -> torch.Tensor:
    """The target's distribution behind `prefix`, by a pass without a cache."""
    target = engine.target
    ids = torch.tensor([[*request.tokens, *prefix]], device=target.device)
    logits = target.head.logits(target.forward(ids).last_hidden[0, -1:])[:, : engine.vocabulary]
    return warp(request.process(logits, prefix, len(prefix)), request.settings)[0]
