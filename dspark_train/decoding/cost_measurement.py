"""Measures a cost table: coarse sizes first, then wherever the curve jumps."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

from dspark_train.decoding.cost_table import CLIFF, CostTable

# seconds of one step of the engine: tokens in the batch, context length
Step = Callable[[int, int], float]


def measure_costs(
    step: Step,
    *,
    max_tokens: int,
    contexts: Sequence[int] = (0,),
    draft: Callable[[int, bool], float] | None = None,
    max_rows: int = 1,
    uneven: Callable[[], float] | None = None,
    budget: float = 2.0,
    clock: Callable[[], float] = perf_counter,
) -> CostTable:
    """Time `step` at sizes up to `max_tokens`, behind every context, and `draft` at row counts.

    First all powers of two, in turns, so that a machine which slows down slows all of them; each
    is priced by its median. Then, while the budget lasts, the widest jump between neighbours is
    halved: a cliff is located to the token if there is time, and priced as dear where not.

    Args:
        step: runs one target pass to its end, and says what it took.
        max_tokens: the largest batch.
        contexts: context lengths, ascending.
        draft: the same for drafting for so many requests, whole proposals or one token; None: it
            costs nothing.
        max_rows: the most requests of a drafter pass.
        uneven: runs a pass of equal requests and one of unequal ones; how many times as long the
            second took. None: as long.
        budget: seconds in all; every size is timed at least twice whatever it takes.
        clock: seconds, for tests.
    """
    began = clock()
    sizes = _powers(max_tokens)
    jobs: dict[tuple[str, int, int], list[float]] = {
        ("verify", context, size): [] for context in contexts for size in sizes
    }
    for whole in (0, 1) if draft else ():
        jobs |= {("draft", whole, rows): [] for rows in _powers(max_rows)}

    def time(kind: str, context: int, size: int) -> None:
        seconds = draft(size, bool(context)) if kind == "draft" else step(size, context)
        jobs[kind, context, size].append(seconds)

    for job in jobs:  # the first run of a shape compiles, allocates and warms caches
        time(*job)
        jobs[job].clear()
    least = 0
    while least < 2 or (least < 5 and clock() - began < budget / 2):
        for job in jobs:
            time(*job)
        least += 1
    unequal = 1.0 if uneven is None else max(median(uneven() for _ in range(7)), 1.0)
    while clock() - began < budget and (gap := _widest_jump(jobs, contexts)):
        for context in contexts:
            jobs["verify", context, gap] = []
        for _ in range(2):
            for context in contexts:
                time("verify", context, gap)

    cost = {job: median(times) for job, times in jobs.items()}
    tokens = sorted({size for kind, _, size in jobs if kind == "verify"})
    rows = sorted({size for kind, _, size in jobs if kind == "draft"})
    return CostTable(
        tuple(tokens),
        tuple(contexts),
        tuple(tuple(cost["verify", context, size] for size in tokens) for context in contexts),
        tuple(rows),
        tuple(cost["draft", 1, size] for size in rows),
        tuple(cost["draft", 0, size] for size in rows),
        unequal,
    )


def _powers(largest: int) -> list[int]:
    return sorted({largest, *(2**i for i in range(largest.bit_length()))})


def _widest_jump(
    jobs: dict[tuple[str, int, int], list[float]], contexts: Sequence[int]
) -> int | None:
    """The size in the middle of the neighbours that differ most, None where all are slopes."""
    tokens = sorted({size for kind, _, size in jobs if kind == "verify"})
    widest, middle = 1 + CLIFF, None
    for low, high in pairwise(tokens):
        if high - low < 2:
            continue
        for context in contexts:
            pair = [median(jobs["verify", context, size]) for size in (low, high)]
            if max(pair) / min(pair) > widest:
                widest, middle = max(pair) / min(pair), (low + high) // 2
    return middle
