"""Do two lots of outputs come from one distribution? A chi-square test, and what it could see."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# a bin needs so many outputs of both lots for the chi-square approximation
_LEAST = 10


@dataclass(frozen=True)
class Comparison:
    """Pearson's test of homogeneity.

    Attributes:
        p_value: chance of a statistic at least as large if the distributions are the same.
        total_variation: half the L1 distance of the two histograms, noise included.
        bins: outputs that are counted on their own, and one for all rare ones.
    """

    p_value: float
    total_variation: float
    bins: int


def compare(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Comparison:
    """Compare two lots of outputs; rare outputs share a bin."""
    together = Counter(ours) + Counter(theirs)
    common = [output for output, count in together.most_common() if count >= _LEAST]
    counts = np.array([_histogram(lot, common) for lot in (ours, theirs)])
    shares = counts / counts.sum(1, keepdims=True)
    total_variation = 0.5 * np.abs(shares[0] - shares[1]).sum()
    return Comparison(_p_value(counts), float(total_variation), counts.shape[1])


def detectable(theirs: Sequence[Hashable], level: float, power: float = 0.9) -> float:
    """The smallest change, in total variation, that `compare` finds with chance `power`.

    By simulation from the histogram of `theirs`: a share of the outputs goes from the most likely
    ones to the rarest bin. 1.0 if none of the grid 0.01, 0.02, 0.05, … is found that surely.
    """
    common = [output for output, count in Counter(theirs).most_common() if count >= _LEAST / 2]
    base = np.array(_histogram(theirs, common), dtype=float)
    base = (base + 0.5) / (base + 0.5).sum()
    random, n = np.random.default_rng(0), len(theirs)
    for change in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        moved = base * (1 - change)
        moved[-1] += change
        found = [
            _p_value(np.array([random.multinomial(n, moved), random.multinomial(n, base)])) < level
            for _ in range(200)
        ]
        if np.mean(found) >= power:
            return change
    return 1.0


def _histogram(outputs: Sequence[Hashable], common: Sequence[Hashable]) -> list[int]:
    counts = Counter(outputs)
    known = [counts[output] for output in common]
    return [*known, len(outputs) - sum(known)]


def _p_value(counts: np.ndarray) -> float:
    counts = counts[:, counts.sum(0) > 0]
    if counts.shape[1] < 2:
        return 1.0
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(counts.shape[1] - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
