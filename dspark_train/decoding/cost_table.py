"""What a step of the engine costs: seconds over tokens in the batch and context length.

The scheduler (DSpark, section 5) weighs expected tokens against `steps_per_second(B)`. That curve
is flat, then falling, with cliffs where the hardware changes its way of working. A cliff must not
be smoothed away: between two measured sizes whose costs differ much, every size is priced as the
dearer of the two. So the table never promises a speed that nobody measured.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

# neighbouring measurements that differ by more are a cliff, not a slope
CLIFF = 0.1


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a step, apart for the target's pass and for drafting.

    Attributes:
        tokens: n sizes of the batch in tokens, anchors included, ascending, from 1 or more.
        contexts: m context lengths, ascending.
        seconds: m rows of n: a target pass over so many tokens, behind such a context.
        draft_rows, draft_seconds: drafting whole proposals for so many requests, ascending; none:
            free.
        draft_one: drafting one token for as many; none: as dear as a whole proposal.
        uneven: how many times as long a pass takes whose requests read different numbers of tokens.

    Raises:
        ValueError: sizes out of order, shapes that do not fit, seconds that are not positive.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    draft_rows: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    draft_one: tuple[float, ...] = ()
    uneven: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("contexts", 0), ("draft_rows", 1)):
            sizes = getattr(self, name)
            ascending = all(a < b for a, b in pairwise(sizes))
            if (
                (not sizes and name != "draft_rows")
                or not ascending
                or min(sizes, default=1) < least
            ):
                raise ValueError(
                    f"cost table: {name}={list(sizes)}, expected whole numbers in ascending order "
                    f"from {least} on"
                )
        shape = (len(self.seconds), {len(row) for row in self.seconds})
        if shape != (len(self.contexts), {len(self.tokens)}):
            raise ValueError(
                f"cost table: seconds has {shape[0]} rows of {sorted(shape[1])} numbers, expected "
                f"{len(self.contexts)} (contexts) of {len(self.tokens)} (tokens)"
            )
        one, whole = len(self.draft_one), len(self.draft_seconds)
        if whole != len(self.draft_rows) or one not in (0, whole):
            raise ValueError(
                f"cost table: {whole} draft_seconds and {one} draft_one for "
                f"{len(self.draft_rows)} draft_rows, expected one each"
            )
        flat = [*self.draft_one, *self.draft_seconds, *(s for row in self.seconds for s in row)]
        if not all(0 < s < float("inf") for s in (*flat, self.uneven)):
            raise ValueError(
                "cost table: expected every time, and uneven, to be a positive number, of seconds "
                "and of times as long"
            )

    @classmethod
    def from_steps_per_second(cls, speeds: Sequence[float]) -> "CostTable":
        """A table of the papers' kind: entry i is `steps_per_second(i + 1)`, at any context."""
        seconds = tuple(1.0 / speed for speed in speeds)
        return cls(tuple(range(1, len(seconds) + 1)), (0,), (seconds,))

    @cached_property
    def _rows(self) -> np.ndarray:
        """Seconds `[m, largest measured size + 1]` at every size; entry 0 repeats entry 1."""
        sizes = np.arange(max(self.tokens) + 1)
        return np.stack([_priced(self.tokens, row, sizes) for row in self.seconds])

    def verify_seconds(self, upto: int, context: float = 0.0) -> np.ndarray:
        """Seconds `[upto + 1]` of a target pass over 0 … `upto` tokens; entry 0 repeats entry 1.

        Between measured contexts linearly (attention reads the context once), at the borders
        constant. Beyond the largest measured size in proportion to it.
        """
        rows = self._rows
        at = float(np.interp(context, self.contexts, np.arange(len(self.contexts))))
        low, share = int(at), at - int(at)
        curve = rows[low] if not share else rows[low] * (1 - share) + rows[low + 1] * share
        return _extended(curve, upto)

    @cached_property
    def _drafting(self) -> np.ndarray:
        """Seconds `[2, largest measured number of rows + 1]`: one token, and a whole proposal."""
        largest = self.draft_rows[-1] if self.draft_rows else 0
        seconds = np.zeros((2, largest + 1))
        for kind, measured in enumerate((self.draft_one or self.draft_seconds, self.draft_seconds)):
            if largest:
                sizes = np.arange(1, largest + 1)
                seconds[kind, 1:] = _priced(self.draft_rows, measured, sizes)
        return seconds

    def drafting_seconds(self, upto: int) -> np.ndarray:
        """Seconds `[upto + 1]` of drafting whole proposals for 0 … `upto` requests; nothing
        measured: 0."""
        return _extended(self._drafting[1], upto)

    def block_seconds(self, requests: int, drafts: np.ndarray | int, slots: int) -> np.ndarray:
        """Seconds of drafting 1 … `slots` tokens, `drafts`, for each of some requests."""
        one, whole = (_extended(kind, requests)[requests] for kind in self._drafting)
        return one + (np.asarray(drafts) - 1) / max(slots - 1, 1) * (whole - one)

    def steps_per_second(self, upto: int, context: float = 0.0, drafting: int = 0) -> np.ndarray:
        """`[upto + 1]`: steps per second with 0 … `upto` tokens, `drafting` requests drafting."""
        draft = self.drafting_seconds(drafting)[drafting]
        return 1.0 / (self.verify_seconds(upto, context) + draft)

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path | str) -> "CostTable":
        """Read JSON as `save` writes it, or CSV with columns tokens, context (optional), and
        seconds or steps_per_second.

        Raises:
            ValueError: a file that cannot be read as such a table; the message names it.
        """
        path = Path(path)
        try:
            if path.suffix == ".csv":
                return _from_csv(path)
            fields = json.loads(path.read_text())
            rows = tuple(tuple(row) for row in fields.pop("seconds"))
            uneven = fields.pop("uneven", 1.0)
            lists = {key: tuple(value) for key, value in fields.items()}
            return cls(seconds=rows, uneven=uneven, **lists)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no cost table ({error}): expected JSON with tokens, contexts and "
                "seconds, or CSV with columns tokens, context and seconds or steps_per_second"
            ) from error


def _extended(seconds: np.ndarray, upto: int) -> np.ndarray:
    """The first `upto + 1` entries; beyond the last in proportion to the size."""
    largest = len(seconds) - 1
    if upto <= largest:
        return seconds[: upto + 1]
    beyond = seconds[-1] * np.arange(largest + 1, upto + 1) / max(largest, 1)
    return np.concatenate((seconds, beyond))


def _priced(sizes: Sequence[int], seconds: Sequence[float], at: np.ndarray) -> np.ndarray:
    """Seconds at sizes `at`, none above the largest of `sizes`, and no smoothing of cliffs."""
    known, cost = np.asarray(sizes), np.asarray(seconds, dtype=np.float64)
    upper = known.searchsorted(at)
    lower = np.maximum(upper - 1, 0)
    low, high = cost[lower], cost[upper]
    share = (at - known[lower]) / np.maximum(known[upper] - known[lower], 1)
    dearer = np.maximum(low, high)
    slope = low + (high - low) * np.clip(share, 0.0, 1.0)
    measured = (at >= known[upper]) | (upper == 0)
    between = np.where(dearer > np.minimum(low, high) * (1 + CLIFF), dearer, slope)
    return np.where(measured, high, between)


def _from_csv(path: Path) -> CostTable:
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    cost = {}
    for line in lines:
        seconds = line.get("seconds")
        value = float(seconds) if seconds else 1.0 / float(line["steps_per_second"])
        cost[int(line.get("context") or 0), int(line["tokens"])] = value
    contexts = sorted({context for context, _ in cost})
    tokens = sorted({size for _, size in cost})
    rows = tuple(tuple(cost[context, size] for size in tokens) for context in contexts)
    return CostTable(tuple(tokens), tuple(contexts), rows)
