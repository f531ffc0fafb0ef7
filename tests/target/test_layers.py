"""The layer-index rule."""

import pytest

from dspark_train.target import default_taps, validate_taps


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B, as released checkpoints have it
        (28, 5, (1, 7, 13, 19, 25)),
        (30, 1, (14,)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_default_taps(num_layers: int, num_taps: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers, num_taps) == taps
    assert validate_taps(taps, num_layers) == taps


@pytest.mark.parametrize(("num_layers", "num_taps"), [(6, 4), (4, 2), (36, 0)])
def test_default_taps_that_do_not_fit(num_layers: int, num_taps: int) -> None:
    with pytest.raises(ValueError, match="taps"):
        default_taps(num_layers, num_taps)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([], "no tapped layer"),
        ([2, 1], r"ascending.*\[1, 2\]"),
        ([1, 1], "duplicates"),
        ([0, 5], r"\[5\] are outside 0 … 4 of a target with 6 layers"),
        ([-1, 2], r"\[-1\] are outside"),
    ],
)
def test_refused_taps(taps: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_taps(taps, 6)
