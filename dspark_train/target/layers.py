"""The layer-index rule: which target layers are tapped, and how their numbers are read.

Index `i` always means the *output* of decoder layer `i`, counted from 0, which transformers
calls `hidden_states[i + 1]`.
"""

from collections.abc import Sequence

import numpy as np


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread `num_taps` taps evenly over the layers 1 … num_layers - 3.

    Source: the released DSpark and DFlash checkpoints, whose layer lists follow this rule. A
    single tap is the middle layer.

    Raises:
        ValueError: if the target is too shallow for that many different taps.
    """
    if num_taps < 1:
        raise ValueError(f"the number of taps is {num_taps}, but at least 1 is needed")
    if num_taps == 1 and num_layers >= 2:
        return ((num_layers - 1) // 2,)
    taps = tuple(int(i) for i in np.round(np.linspace(1, num_layers - 3, num_taps)))
    if len(set(taps)) < num_taps or num_layers < 4:
        raise ValueError(
            f"{num_taps} different taps do not fit between layer 1 and layer {num_layers - 3} of a "
            f"target with {num_layers} layers; ask for fewer taps or name the layers yourself"
        )
    return taps


def validate_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Check the tapped layers against the target and return them as a tuple.

    The last layer is refused because engines disagree on what its captured output is: some give
    it before, some after the final norm.

    Raises:
        ValueError: if the list is empty, unsorted, has duplicates or leaves 0 … num_layers - 2.
    """
    layers = tuple(int(i) for i in taps)
    if not layers:
        raise ValueError("no tapped layer is named; name at least one")
    if list(layers) != sorted(set(layers)):
        raise ValueError(
            f"tapped layers {list(layers)} must be in ascending order without duplicates: "
            f"{sorted(set(layers))}"
        )
    outside = [i for i in layers if not 0 <= i < num_layers - 1]
    if outside:
        raise ValueError(
            f"tapped layers {outside} are outside 0 … {num_layers - 2} of a target with "
            f"{num_layers} layers (its last layer cannot be tapped)"
        )
    return layers
