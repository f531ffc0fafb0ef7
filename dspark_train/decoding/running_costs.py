"""A cost table that is corrected by what the rounds of an engine really take.

A table is measured on equal requests while nobody asks. Served rounds have unequal ones, longer
contexts, and share the machine with the load. All of that is seen in their seconds. They belong to
rounds that are over, so no decision about a draft anticipates anything by them.
"""

from dataclasses import replace

import numpy as np

from dspark_train.decoding.cost_table import CostTable

# rounds are counted at so many sizes per octave, and tell about sizes near them by that distance
GRID, WIDTH = 4, 0.25
# of what was seen so far, the share that one more round leaves; and how many rounds of a size
# itself weigh as much as all others
KEEP, PRIOR = 0.998, 0.25
# a round interrupted by something else, or the first of its shape, is no news about its size
LIKELY = 4.0
# seconds of rounds between two corrections: sizes and hulls are computed anew
PAUSE = 0.25
# rounds between two that are smaller than the policy wants
LOOK = 48


class RunningCosts:
    """Ratios of real to tabulated seconds: one per size of the target's pass, one for drafting.

    Sizes that were not served take what a line through all others says, ratio over size, both as
    logarithms.

    Args:
        table: measured or given. Its seconds may leave out what every round takes beside the
            target's pass: that is learnt too.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.rows, self.octaves = np.array(table.seconds), np.log2(table.tokens)
        self.grid = np.arange(0.0, self.octaves[-1] + 1.0, 1.0 / GRID)
        self.kernel = np.exp(-0.5 * ((self.grid[:, None] - self.octaves) / WIDTH) ** 2)
        # sums of log ratios and of weights: per size of the grid, and of drafting
        self.rounds, self.drafts = np.zeros((2, len(self.grid))), np.zeros(2)
        self.since = 0.0

    def observe(self, tokens: int, context: float, seconds: float, uneven: bool = False) -> None:
        """What all but drafting took in a round of so many tokens, anchors included; `uneven` if
        its requests read different numbers of them."""
        self.since += seconds
        table = self.table
        at = np.interp(context, table.contexts, np.arange(len(table.contexts)))
        low, share = int(at), at % 1
        # the table itself prices a size that nobody measured as dear
        expected, *more = (np.interp(tokens, table.tokens, row) for row in self.rows[low : low + 2])
        expected += share * (more[0] - expected) if more else 0.0
        expected *= max(tokens / table.tokens[-1], 1.0) * (table.uneven if uneven else 1.0)
        place = min(round(GRID * np.log2(tokens)), len(self.grid) - 1)
        log = _log_ratio(seconds, expected, self.rounds.sum(1))
        self.rounds *= KEEP
        self.rounds[:, place] += log, 1.0
        self.drafts *= KEEP

    def observe_drafting(self, requests: int, drafts: int, slots: int, seconds: float) -> None:
        """What drafting took; other arguments as those of `CostTable.block_seconds`."""
        self.since += seconds
        expected = float(self.table.block_seconds(requests, drafts, slots))
        if expected > 0:
            self.drafts += _log_ratio(seconds, expected, self.drafts), 1.0

    def trial(self, turn: int, slots: int) -> int | None:
        """How many drafts a request may have in round `turn`, by turns none and half of them; None:
        as many as the policy wants.

        A policy that always takes the same size learns what it costs, and never whether a smaller
        one would be cheaper. Looked for often at first: in rounds 1, 2, 4, … and every `LOOK`.
        """
        early = turn.bit_length() - 1 if 0 < turn < LOOK and turn & (turn - 1) == 0 else None
        number = turn // LOOK if turn and turn % LOOK == 0 else early
        return None if number is None else (number % 2) * (slots // 2)

    def due(self) -> bool:
        """Whether enough has happened since the last call that said so."""
        if self.since < PAUSE:
            return False
        self.since = 0.0
        return True

    def corrected(self) -> CostTable:
        """The table at the speed of now."""
        logs, weights = self.rounds
        mean, at = _mean(self.rounds.sum(1)), self.grid @ weights / max(weights.sum(), 1.0)
        away = self.grid - at
        slope = away @ (logs - mean * weights) / (away**2 @ weights + PRIOR)
        beside = (logs - (mean + slope * away) * weights) @ self.kernel
        beside /= weights @ self.kernel + PRIOR
        ratios = np.exp(mean + slope * (self.octaves - at) + beside)
        # who does not draft learns nothing about it: what was seen fades behind one round that took
        # what the table says, and drafts are tried again
        draft = float(np.exp(self.drafts[0] / (self.drafts[1] + 1.0)))
        return replace(
            self.table,
            seconds=tuple(map(tuple, (self.rows * ratios).tolist())),
            draft_seconds=tuple(draft * one for one in self.table.draft_seconds),
            draft_one=tuple(draft * one for one in self.table.draft_one),
        )


def _mean(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] else 0.0


def _log_ratio(seconds: float, expected: float, so_far: np.ndarray) -> float:
    """Of real to expected, not far from the mean so far (at first: from the table)."""
    mean, reach = _mean(so_far), float(np.log(LIKELY))
    return float(np.clip(np.log(max(seconds, 1e-9) / expected), mean - reach, mean + reach))
