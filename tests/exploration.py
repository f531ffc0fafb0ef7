"""The exact output distribution of the real engine, by exploring its random choices.

A decision of the decoder is a piecewise constant function of one uniform number. Instead of a
number the engine gets an open one; whenever the real `draw` or `verify` has to decide on it, the
pieces are found by asking the real function, and every piece is followed, weighted by its measure.
The single point u = 0 is a piece of its own where the decision differs there: it has no measure,
but a generator can return it.

An open number that is asked for again keeps the bounds of its earlier answer. So the result is
that of keyed random numbers, including numbers which are shared where they should not be.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from dspark_train.decoding import engine as engine_module
from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.proposers import block as block_module
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.verify import Verdict
from dspark_train.target import TargetOutput

Key = tuple[int, str]
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

    def uniform(self, position: int, purpose: str) -> Open:
        assert position >= self.committed, f"a number for {position} was asked after its use"
        return Open((position, purpose))

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
        draw, verify = engine_module.draw, engine_module.verify

        def explored_draw(probs: torch.Tensor, u: Open) -> int:
            identity = ("draw", probs.numpy().tobytes())
            steps = probs.double().cumsum(0)
            guesses = (steps / steps[-1]).tolist()
            return self.choose(u.key, identity, lambda x: draw(probs, x), guesses).value

        def explored_verify(
            target_probs: torch.Tensor,
            tokens: list[int],
            draft_probs: torch.Tensor | None,
            uniforms: list[Open],
        ) -> Verdict:
            drafted = b"" if draft_probs is None else draft_probs.numpy().tobytes()
            rows = target_probs.numpy().tobytes()
            numbers = [math.nextafter(1.0, 0.0)] * len(tokens)
            for i, u in enumerate(uniforms):

                def rejected(x: float, i: int = i) -> int:
                    given = [*numbers[:i], x, *numbers[i + 1 :]]
                    return verify(target_probs, tokens, draft_probs, given).accepted <= i

                piece = self.choose(u.key, ("verify", i, rows, drafted, tuple(tokens)), rejected)
                numbers[i] = piece.inside
                if piece.value:
                    break
            return verify(target_probs, tokens, draft_probs, numbers)

        with (
            mock.patch.object(engine_module, "draw", explored_draw),
            mock.patch.object(engine_module, "verify", explored_verify),
            mock.patch.object(block_module, "draw", explored_draw),
        ):
            yield


@dataclass
class Outcome:
    """What the exploration found.

    Attributes:
        probabilities: of every token sequence that the decoder can return.
        reached: every (prefix, token) that it committed on any branch, those without measure too.
    """

    probabilities: dict[tuple[int, ...], float]
    reached: set[tuple[tuple[int, ...], int]]


def explore(
    engine: Engine,
    prompt: list[int],
    settings: SamplingSettings,
    length: int,
    eos_ids: tuple[int, ...] = (),
) -> Outcome:
    """Output distribution of `engine` for `length` new tokens after `prompt`."""
    return _Exploration(engine, prompt, settings, length, eos_ids).run()


class _Exploration:
    """Depth first over the committed tokens; within a round, over every choice."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        settings: SamplingSettings,
        length: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.engine, self.explorer = engine, Explorer()
        self.request = Request(prompt, settings, length, eos_ids)
        self.request.randomness = self.explorer
        self.outcome = Outcome(defaultdict(float), set())
        self.passes: dict[tuple, object] = {}

    def run(self) -> Outcome:
        with self.explorer.installed():
            self._from(lambda: self.engine.start(self.request), {}, 1.0)
        return self.outcome

    def _from(self, act: Callable[[], object], bounds: Bounds, weight: float) -> None:
        """Follow everything that `act` may do, then everything after it."""
        before = len(self.request.tokens)
        explorer, request = self.explorer, self.request
        explorer.committed = before
        children: dict[tuple, dict[tuple, list]] = defaultdict(dict)
        script: list[int] | None = []
        while script is not None:
            explorer.begin(script, bounds)
            with self._remembered():
                act()
            tokens = tuple(request.tokens)
            for place in range(before, len(tokens)):
                self.outcome.reached.add((tokens[:place], tokens[place]))
            live = {k: b for k, b in explorer.bounds.items() if k[0] >= len(tokens)}
            ended = request.finish_reason is not None
            group = children[tokens, ended, tuple(sorted(live))]
            state = group.setdefault(tuple(sorted(live.items())), [0.0, list(explorer.script)])
            state[0] += explorer.weight
            script = explorer.next_script()
            self._back(before)
        for (tokens, ended, _), group in children.items():
            for live, share, path in _merged(group):
                if ended:
                    new = tokens[request.prompt_length :]
                    self.outcome.probabilities[new] += weight * share
                elif share > 0:
                    explorer.committed = before
                    explorer.begin(path, bounds)
                    act()  # for real, so that the caches are those of this history
                    assert tuple(request.tokens) == tokens
                    self._from(self._round, dict(live), weight * share)
                    self._back(before)

    def _round(self) -> None:
        self.engine.step(self.request)

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """Run each model once per history. What these runs leave in the caches is taken back."""
        engine, history = self.engine, tuple(self.request.tokens)

        def forward(ids: torch.Tensor, *, cache: KVCache, **rest: object) -> TargetOutput:
            identity = ("target", history, *ids[0].tolist())
            if identity not in self.passes:
                self.passes[identity] = real_forward(ids, cache=cache, **rest)
            else:
                cache.advance(ids.shape[1])
            return self.passes[identity]

        def pure(function: Callable, name: str) -> Callable:
            def call(inputs: torch.Tensor, *rest: object) -> object:
                identity = (name, history, inputs.numpy().tobytes())
                if identity not in self.passes:
                    self.passes[identity] = function(inputs, *rest)
                return self.passes[identity]

            return call

        real_forward = engine.target.forward
        patches = [mock.patch.object(engine.target, "forward", forward)]
        if isinstance(engine.proposer, BlockProposer):
            drafter = engine.proposer.drafter
            for name in ("backbone", "context_kv"):
                patches.append(mock.patch.object(drafter, name, pure(getattr(drafter, name), name)))
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield

    def _back(self, length: int) -> None:
        """Return request and caches to `length` committed tokens."""
        engine, request = self.engine, self.request
        del request.tokens[length:]
        request.finish_reason = None
        if length == request.prompt_length:
            return  # the first act reads the prompt anew
        engine.cache.truncate([length - 1])
        proposer = engine.proposer
        if hasattr(proposer, "cache"):
            proposer.cache.truncate([length - 1])
        else:
            proposer.start(request.tokens)


def _merged(group: dict[tuple, list]) -> Iterator[tuple[tuple, float, list[int]]]:
    """States of equal tokens, joined where the open numbers that remain are uniform again.

    A draft that was discarded leaves bounds on its number. If all its pieces lead to the same
    tokens in proportion to their measure, nothing was learnt about the number.
    """
    measures = [math.prod(high - low for _, (low, high) in live) for live in group]
    weights = [weight for weight, _ in group.values()]
    total = sum(weights)
    uniform = abs(sum(measures) - 1) < 1e-9 and all(
        abs(w - m * total) < 1e-9 for w, m in zip(weights, measures, strict=True)
    )
    if uniform:
        yield (), total, max(group.values(), key=lambda state: state[0])[1]
        return
    for live, (weight, path) in group.items():
        yield live, weight, path
