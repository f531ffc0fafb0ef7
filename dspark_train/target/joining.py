"""Linear layers that read the same tensor, as one product.

Queries, keys and values of a layer, or the two halves of a gated MLP. Every product has a price of
its own, 12 µs on two cores, which is the half of it where few tokens meet a few hundred features;
passes over 1 to 8 tokens of a 135M model get 2 to 4 % shorter. Which layers belong together is not
read off their names: a short pass shows which of one module's are given the very same tensor.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dspark_train.target.packing import close

Place = tuple[nn.Module, str]


class Joined(nn.Module):
    """Several linear layers in one.

    The first that is asked computes all of them; the others find theirs, if they are given the same
    tensor.

    Attributes:
        whole: the layer, rows of the parts one after another.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        inputs, bias = parts[0].in_features, parts[0].bias
        self.whole = nn.Linear(inputs, sum(self.sizes), bias=bias is not None, device="meta")
        for name in [name for name, _ in self.whole.named_parameters()]:
            rows = torch.cat([getattr(part, name) for part in parts])
            setattr(self.whole, name, nn.Parameter(rows, requires_grad=False))
            # the parts keep working, without a second copy of their weights
            for part, piece in zip(parts, rows.split(self.sizes), strict=True):
                getattr(part, name).data = piece
        # features may be computed on one thread while another decodes
        self.pending = threading.local()

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Output `[..., out]` of one layer, for `x` `[..., in]`."""
        pending = self.pending
        if getattr(pending, "x", None) is not x or number not in pending.outputs:
            pending.x = x
            outputs = self.whole.forward(x).split_with_sizes(self.sizes, -1)
            pending.outputs = dict(enumerate(outputs))
        output = pending.outputs.pop(number)
        if not pending.outputs:
            pending.x = None
        return output


class JoinedLinear(nn.Module):
    """One of the layers of a `Joined`, in the place where it was."""

    def __init__(self, joined: Joined, number: int) -> None:
        super().__init__()
        self.joined, self.number = joined, number
        self.in_features, self.out_features = joined.whole.in_features, joined.sizes[number]

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[out, in]`."""
        return self.joined.whole.weight.split(self.joined.sizes)[self.number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` to `[..., out]`."""
        return self.joined.part(self.number, x)


@torch.no_grad()
def join_linears(module: nn.Module, run: Callable[[], torch.Tensor]) -> None:
    """Join what can be joined in a frozen `module`, unless a pass then gives something else.

    Args:
        run: a short pass through `module`; its output.
    """
    expected, groups = read_together(module, run)
    originals = []
    for group in groups:
        joined = Joined([getattr(parent, name) for parent, name in group])
        for number, (parent, name) in enumerate(group):
            originals.append((parent, name, getattr(parent, name)))
            setattr(parent, name, JoinedLinear(joined, number))
    try:
        agreed = close(run(), expected)
    except Exception:  # whatever a family does with a layer that has no bias, or with its parts
        agreed = False
    if not agreed:
        for parent, name, linear in originals:
            setattr(parent, name, linear)


def read_together(
    module: nn.Module, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, list[list[Place]]]:
    """What `run` gives, and the layers of one parent that it gives the very same tensor."""
    reads: list[tuple[Place, torch.Tensor]] = []

    def note(place: Place, layer: nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
        reads.extend((place, x) for x in args)

    hooks = [
        child.register_forward_pre_hook(partial(note, (parent, name)))
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    try:
        output = run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(place for place, _ in reads)
    groups: dict[Any, list[Place]] = {}
    for place, x in reads:  # which keeps them alive, so that their ids differ
        linear = getattr(*place)
        kind = (place[0], id(x), linear.weight.dtype, linear.bias is None)
        if times[place] == 1:
            groups.setdefault(kind, []).append(place)
    return output, [group for group in groups.values() if len(group) > 1]
