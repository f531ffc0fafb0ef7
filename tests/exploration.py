"""The exact output distribution of the real engine, by following every choice it can make.

Every piece of every decision is followed and weighted by its measure, see `open_numbers`.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer, CausalProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import TargetOutput
from tests.open_numbers import Bounds, Explorer


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
            self._from(self._start, {}, 1.0)
        return self.outcome

    def _from(self, act: Callable[[], object], bounds: Bounds, weight: float) -> None:
        """Follow everything that `act` may do, then everything after it."""
        before, memory = len(self.request.tokens), pickle.dumps(self.engine.scheduler)
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
            live = {
                k: b
                for k, b in explorer.bounds.items()
                if k[0] >= len(tokens) and k[1] != "propose"  # its anchor has passed
            }
            ended = request.finish_reason is not None
            remembers = pickle.dumps(self.engine.scheduler)
            group = children[tokens, ended, tuple(sorted(live)), remembers]
            state = group.setdefault(tuple(sorted(live.items())), [0.0, list(explorer.script)])
            state[0] += explorer.weight
            script = explorer.next_script()
            self._back(before, memory)
        for (tokens, ended, *_), group in children.items():
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
                    self._back(before, memory)

    def _start(self) -> None:
        for left in tuple(self.engine.requests):
            self.engine.remove(left)
        self.engine.add([self.request])

    def _round(self) -> None:
        self.engine.step()

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """Run each model once per history. What these runs leave in the caches is taken back."""
        engine, history = self.engine, tuple(self.request.tokens)

        def forward(ids: torch.Tensor, *, cache: KVCache, **rest: object) -> TargetOutput:
            # the branches of a tree
            mask, places = rest["attention_mask"], rest["position_ids"].tolist()
            tree = None if mask is None else mask.numpy().tobytes()
            identity = ("target", history, *ids[0].tolist(), *places[0], tree)
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

    def _back(self, length: int, memory: bytes) -> None:
        """Return request and caches to `length` committed tokens, the scheduler to its memory."""
        engine, request = self.engine, self.request
        engine.scheduler = pickle.loads(memory)
        del request.tokens[length:]
        request.finish_reason = None
        if length == request.prompt_length:
            return  # the first act reads the prompt anew
        engine.cache.truncate([length - 1])
        proposer = engine.proposer
        if isinstance(proposer, CausalProposer):
            proposer.observe(0, [request], None, [length - 1 - proposer._valid[0]])
        elif hasattr(proposer, "cache"):
            proposer.cache.truncate([length - 1])
        else:
            proposer.start(0)


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
