"""Uniform numbers that are not decided yet, and the choices that the engine makes on them.

A decision of the decoder is a piecewise constant function of one uniform number. Instead of a
number the engine gets an open one; whenever the real `draw` or `verify` has to decide on it, the
pieces are found by asking the real function. The single point u = 0 is a piece of its own where
the decision differs there: it has no measure, but a generator can return it.

An open number that is asked for again keeps the bounds of its earlier answer. So the result is
that of keyed random numbers, including numbers which are shared where they should not be.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from dspark_train.decoding import tree_verify as tree_verify_module
from dspark_train.decoding import verdicts as verdicts_module
from dspark_train.decoding.proposers import drawing as drawing_module
from dspark_train.decoding.proposers import growing as growing_module
from dspark_train.decoding.sampling import draw
from dspark_train.decoding.verify import Verdict

# position, purpose, then anchor and branch where there are any
Key = tuple[int, str, *tuple[int, ...]]
Bounds = dict[Key, tuple[float, float]]
TINY = 1e-300
PRECISION = 1e-12


@dataclass(frozen=True)
class Open:
    """A uniform number that is not decided yet."""

    key: Key


@dataclass(frozen=True)
class Piece:
    """Where a decision has one value: `[low, high)`, or the point 0 where both are 0."""

    low: float
    high: float
    value: int

    @property
    def inside(self) -> float:
        return (self.low + self.high) / 2


def pieces_of(decide: Callable[[float], int], guesses: Sequence[float] = ()) -> list[Piece]:
    """Partition [0, 1) by the value of a monotone step function.

    Steps are found by bisection; a right guess of where one is only saves time.
    """
    top = math.nextafter(1.0, 0.0)
    found, left, value = [], TINY, decide(TINY)
    if decide(0.0) != value:
        found.append(Piece(0.0, 0.0, decide(0.0)))
    while (last := decide(top)) != value:
        low, high = left, top
        for guess in guesses:
            below, above = guess - PRECISION / 2, guess + PRECISION / 2
            if left < below and above < top and decide(below) == value != decide(above):
                low, high = below, above
                break
        while high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if decide(middle) == value else (low, middle)
        found.append(Piece(0.0 if left == TINY else left, high, value))
        left, value = high, decide(high)
    found.append(Piece(0.0 if left == TINY else left, 1.0, last))
    return found


class Explorer:
    """Stands in for `Randomness` and leads a run along a script of choices."""

    def __init__(self) -> None:
        self.memo: dict[tuple, list[Piece]] = {}
        self.committed = 0
        self.begin([], {})

    def begin(self, script: list[int], bounds: Bounds) -> None:
        """A run that follows `script`, and takes the first piece of every choice after it."""
        self.script, self.bounds = list(script), dict(bounds)
        self.sizes: list[int] = []
        self.weight = 1.0

    def next_script(self) -> list[int] | None:
        """The script after this run's in depth-first order, None after the last."""
        for depth in reversed(range(len(self.sizes))):
            if self.script[depth] + 1 < self.sizes[depth]:
                return [*self.script[:depth], self.script[depth] + 1]
        return None

    def uniform(self, position: int, purpose: str, branch: int = 0) -> Open:
        assert position >= self.committed, f"a number for {position} was asked after its use"
        return Open((position, purpose, branch))

    def proposing(self, position: int, anchor: int, branch: int = 0) -> Open:
        return Open((position, "propose", anchor, branch))

    def choose(
        self,
        key: Key,
        identity: tuple,
        decide: Callable[[float], int],
        guesses: Sequence[float] = (),
    ) -> Piece:
        """Follow one piece of the decision on the open number `key`."""
        if identity not in self.memo:
            self.memo[identity] = pieces_of(decide, guesses)
        low, high = self.bounds.get(key, (0.0, 1.0))
        options = []
        for piece in self.memo[identity]:
            left, right = max(low, piece.low), min(high, piece.high)
            point = piece.high == 0 and low == 0
            if point or (left < right and piece.high > 0):
                options.append(Piece(left, right if not point else 0.0, piece.value))
        depth = len(self.sizes)
        if depth == len(self.script):
            self.script.append(0)
        self.sizes.append(len(options))
        piece = options[self.script[depth]]
        self.weight *= (piece.high - piece.low) / (high - low) if high > low else 1.0
        self.bounds[key] = (piece.low, piece.high)
        return piece

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context the engine's and the drafter's decisions are explored."""
        verify = verdicts_module.verify

        def explored_draw(probs: torch.Tensor, u: Open) -> int:
            identity = ("draw", probs.numpy().tobytes())
            steps = probs.double().cumsum(0)
            guesses = (steps / steps[-1]).tolist()
            return self.choose(u.key, identity, lambda x: draw(probs, x), guesses).value

        def explored_draws(rows: torch.Tensor, uniforms: list[Open]) -> torch.Tensor:
            pairs = zip(rows, uniforms, strict=True)
            return torch.tensor([explored_draw(probs, u) for probs, u in pairs])

        def explored_verify(
            target_probs: torch.Tensor,
            tokens: list[int],
            draft_probs: torch.Tensor | None,
            uniforms: list[Open],
            pairs: list[tuple[float, float]],
        ) -> Verdict:
            drafted = b"" if draft_probs is None else draft_probs.numpy().tobytes()
            rows = target_probs.numpy().tobytes()
            numbers = [math.nextafter(1.0, 0.0)] * len(tokens)
            for i, u in enumerate(uniforms):

                def rejected(x: float, i: int = i) -> int:
                    given = [*numbers[:i], x, *numbers[i + 1 :]]
                    return verify(target_probs, tokens, draft_probs, given, pairs).accepted <= i

                piece = self.choose(u.key, ("verify", i, rows, drafted, tuple(tokens)), rejected)
                numbers[i] = piece.inside
                if piece.value:
                    break
            return verify(target_probs, tokens, draft_probs, numbers, pairs)

        accepts = tree_verify_module.accepts

        def explored_accepts(u: Open, draft_prob: float, target_prob: float) -> bool:
            identity = ("accepts", draft_prob, target_prob)
            ratio = [target_prob / draft_prob]
            return not self.choose(
                u.key, identity, lambda x: not accepts(x, draft_prob, target_prob), ratio
            ).value

        with (
            mock.patch.object(verdicts_module, "draw_rows", explored_draws),
            mock.patch.object(verdicts_module, "verify", explored_verify),
            mock.patch.object(drawing_module, "draw_rows", explored_draws),
            mock.patch.object(growing_module, "draw_rows", explored_draws),
            mock.patch.object(tree_verify_module, "draw_rows", explored_draws),
            mock.patch.object(tree_verify_module, "accepts", explored_accepts),
        ):
            yield
