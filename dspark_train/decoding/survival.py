"""How likely a draft and all before it stand, and how many drafts are worth their place.

Arrays are `[R, K]`: R requests, K slots of the proposal. An *extension* is one more draft of one
request. Extensions are ranked by survival; within a request survival never rises, so the best n of
all are always a prefix of every request. Of equal ones the lower request comes first.
"""

import numpy as np


def survival(logits: np.ndarray, temperatures: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """`a[r, j] = Π_{i≤j} σ(logit_i / T_i)`, float32 `[R, K]`; 0 where nothing was drafted.

    Args:
        logits: `[R, K]` confidence logits. One that is not a number counts as no confidence.
        temperatures: `[≥ K]` from calibration.
        drafted: `[R]` drafts of each request.
    """
    # σ(x) = (1 + tanh(x/2)) / 2 cannot overflow
    half = (0.5 / temperatures[: logits.shape[1]]).astype(np.float32)
    chance = np.tanh(logits * half, dtype=np.float32)
    chance += 1.0
    chance *= 0.5
    np.fmax(chance, 0.0, out=chance)
    chance *= np.arange(chance.shape[1]) < drafted[:, None]
    return cumulative(chance)


def cumulative(chances: np.ndarray) -> np.ndarray:
    """Products `[R, K]` of every slot's chance with those before it, in place."""
    # numpy's cumprod walks the short rows one by one
    for k in range(1, chances.shape[1]):
        chances[:, k] *= chances[:, k - 1]
    return chances


def ranked(survivals: np.ndarray) -> np.ndarray:
    """All survivals that are not zero, in descending order `[n]`."""
    order = np.sort(survivals, axis=None)[::-1]
    return order[: np.count_nonzero(order)]


def throughput(ranking: np.ndarray, requests: int, steps_per_second: np.ndarray) -> np.ndarray:
    """`Θ(n) = (R + Σ_{first n} a) · SPS(R + n)`, expected tokens per second, `[n + 1]`.

    Args:
        ranking: survivals in descending order.
        requests: R; each adds its anchor to the batch and one token to what is committed.
        steps_per_second: `[≥ R + n + 1]`, indexed by tokens in the batch.
    """
    return committed(ranking, requests) * steps_per_second[requests : requests + len(ranking) + 1]


def committed(ranking: np.ndarray, requests: int) -> np.ndarray:
    """Expected tokens `R + Σ_{first n} a` of a step, `[n + 1]`."""
    tokens = np.empty(len(ranking) + 1)
    tokens[0] = requests
    np.cumsum(ranking, out=tokens[1:])
    tokens[1:] += requests
    return tokens


def first_drop(theta: np.ndarray) -> int:
    """How many extensions come before the first that does not raise Θ (DSpark, Algorithm 1)."""
    stops = theta[1:] <= theta[:-1]
    return int(stops.argmax()) if stops.any() else len(theta) - 1


def fill(survivals: np.ndarray, ranking: np.ndarray, count: int) -> np.ndarray:
    """Verify lengths `[R]` that take the best `count` extensions.

    Args:
        survivals: `[R, K]`, never rising within a row.
        ranking: the same, `ranked`.
        count: at most `len(ranking)` are taken.
    """
    if count <= 0 or not len(ranking):
        return np.zeros(len(survivals), dtype=np.int64)
    border = ranking[min(count, len(ranking)) - 1]
    lengths = np.count_nonzero(survivals >= border, axis=1)
    surplus = int(lengths.sum()) - count
    if surplus > 0:
        tied = np.count_nonzero(survivals == border, axis=1)
        above = lengths - tied
        room = np.clip(tied.sum() - surplus - (tied.cumsum() - tied), 0, tied)
        lengths = above + room
    return lengths
