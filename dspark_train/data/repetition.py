"""Degenerate repetition: an answer that ran into a loop and does not get out."""

from collections.abc import Sequence

import numpy as np

LONGEST_PERIOD = 64
LEAST_TOKENS = 32
LEAST_ROUNDS = 4


def loop_length(tokens: Sequence[int]) -> int:
    """How many tokens at the end repeat with a period of at most 64; 0 if that is no loop.

    A loop goes round four times at least and holds 32 tokens at least.
    """
    ids, longest = np.asarray(tokens), 0
    for period in range(1, min(LONGEST_PERIOD, len(ids) // LEAST_ROUNDS) + 1):
        differ = np.flatnonzero(ids[period:] != ids[:-period])
        start = int(differ[-1]) + 1 if len(differ) else 0
        repeating = len(ids) - start
        if repeating >= max(LEAST_TOKENS, LEAST_ROUNDS * period):
            longest = max(longest, repeating)
    return longest


def is_degenerate(response: Sequence[int], eos_ids: Sequence[int]) -> bool:
    """Whether a response, its EOS apart, ends in a loop."""
    ended = bool(response) and response[-1] in eos_ids
    return loop_length(response[:-1] if ended else response) > 0
