"""Random numbers keyed by request, position and purpose. No state, so no order to get wrong."""

import secrets
from typing import Any, Literal

import numpy as np

Purpose = Literal["propose", "accept", "resample", "target"]

_PURPOSES: dict[str, int] = {"propose": 1, "accept": 2, "resample": 3, "target": 4}
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STEP = 0x9E37_79B9_7F4A_7C15


def _mix(x: Any) -> Any:
    # splitmix64's finaliser (Steele, Lea, Flood 2014) on Python ints or uint64 arrays alike
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return x ^ (x >> 31)


def keyed_uniforms(seeds: Any, positions: Any, purpose: Purpose, branch: int = 0) -> Any:
    """Uniforms in [0, 1) that depend on (seed, position, purpose, branch) alone.

    Args:
        seeds, positions: Python ints below 2^64, or uint64 arrays `[n]`.
        purpose: proposing, accepting, resampling and the target's own tokens never share a number.
        branch: of a tree; a chain is branch 0 everywhere.

    Returns:
        A float, or float64 `[n]`.
    """
    x = _mix((seeds + (_STEP * _PURPOSES[purpose] & _MASK)) & _MASK)
    x = _mix((x + _STEP * (positions + 1)) & _MASK)
    if branch:
        x = _mix((x + _STEP * branch) & _MASK)
    return (x >> 11) * 2.0**-53


def keyed_seed(seed: Any, anchor: Any) -> Any:
    """Another seed for every anchor; arguments as those of `keyed_uniforms`."""
    return _mix((seed + _STEP * (anchor + 1)) & _MASK)


class Randomness:
    """The random numbers of one request: counter-based, without state.

    Args:
        seed: any integer; None takes one from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed & _MASK

    def uniform(self, position: int, purpose: Purpose, branch: int = 0) -> float:
        """The number in [0, 1) for the token at `position`, for one purpose."""
        return keyed_uniforms(self.seed, position, purpose, branch)

    def proposing(self, position: int, anchor: int, branch: int = 0) -> float:
        """The number that the token at `position` is drafted with behind `anchor`.

        A draft that was discarded does not share its number with the one that is drafted in its
        place later: else a scheduler that remembers confidences would know something about it.
        """
        return keyed_uniforms(keyed_seed(self.seed, anchor), position, "propose", branch)


def seed_array(seeds: list[int]) -> np.ndarray:
    """Seeds as the uint64 array `[n]` that `keyed_uniforms` takes for many requests at once."""
    return np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
