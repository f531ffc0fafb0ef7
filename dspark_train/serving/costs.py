"""Measures the cost table of an engine by running it: a second or two at the start of a server."""

from collections.abc import Sequence

from dspark_train.decoding.cost_measurement import measure_costs
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Fixed

CONTEXT = 32
# requests of an uneven pass: more differ no more
UNEVEN_ROWS = 8


def engine_costs(engine: Engine, slots: int, *, budget: float = 2.0) -> CostTable:
    """Seconds of rounds of 1 to `rows · (slots + 1)` tokens without drafting, and of drafting.

    A pass of B tokens is measured as requests of equal width: as many as give B, or the fewest
    tokens above it. The engine's scheduler is put back afterwards.

    Args:
        engine: without requests.
        slots: drafts of a proposal.
        budget: seconds.

    Raises:
        ValueError: an engine with requests.
    """
    if engine.requests:
        raise ValueError(f"an engine with {len(engine.requests)} requests cannot be measured")
    kept = engine.scheduler
    bench = _Bench(engine, slots)
    try:
        return measure_costs(
            bench.verify,
            max_tokens=engine.rows * (slots + 1),
            contexts=(CONTEXT,),
            draft=bench.draft if slots else None,
            max_rows=engine.rows,
            uneven=bench.uneven if slots > 1 and engine.rows > 1 and not engine.pads else None,
            budget=budget,
        )
    finally:
        bench.fill(0)
        engine.scheduler = kept


def layout(tokens: int, rows: int, widest: int) -> tuple[int, int]:
    """How many requests of what width make a pass of `tokens`, or of few more.

    Rounding up to all rows would price 65 tokens of 64 rows as 128: a cliff that is not there.
    """
    count = range(-(-tokens // widest), min(rows, tokens) + 1)
    best = min(count, key=lambda n: (n * -(-tokens // n), -n))
    return best, -(-tokens // best)


class _Given(Fixed):
    """Drafts of each request."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = list(lengths)

    def limits(self, requests: Sequence[Request]) -> list[int]:
        return self.lengths


class _Bench:
    """Rounds of so many requests at so many tokens."""

    def __init__(self, engine: Engine, slots: int) -> None:
        self.engine, self.slots = engine, slots

    def verify(self, tokens: int, context: int) -> float:
        rows, width = layout(tokens, self.engine.rows, self.slots + 1)
        return self._round(rows, Fixed(width - 1))[1]

    def draft(self, rows: int, whole: bool) -> float:
        return self._round(rows, Fixed(self.slots if whole else 1))[0]

    def uneven(self) -> float:
        """How many times as long no drafts and two take, by turns, as one of each."""
        rows = min(self.engine.rows, UNEVEN_ROWS)
        rows -= rows % 2
        even = self._round(rows, Fixed(1))[1]
        return self._round(rows, _Given([2 * (i % 2) for i in range(rows)]))[1] / even

    def _round(self, rows: int, scheduler: Fixed) -> tuple[float, float]:
        """Seconds of drafting, and of all else."""
        self.fill(rows)
        self.engine.scheduler = scheduler
        seconds = [one.seconds for one in self.engine.step()]
        drafting = sum(s.draft + s.walk for s in seconds)
        return drafting, sum(map(sum, seconds)) - drafting

    def fill(self, rows: int) -> None:
        """Have `rows` requests that are far from their ends."""
        engine = self.engine
        for request in [r for r in engine.requests if r.remaining < 2 * self.slots + 4]:
            engine.remove(request)
        while len(engine.requests) > rows:
            engine.remove(engine.requests[-1])
        room = min(512, engine.target.max_positions - CONTEXT)
        prompt = [token % engine.target.vocab_size for token in range(1, CONTEXT + 1)]
        fresh = [
            Request(prompt, SamplingSettings(), room) for _ in range(rows - len(engine.requests))
        ]
        if fresh:
            engine.add(fresh)
