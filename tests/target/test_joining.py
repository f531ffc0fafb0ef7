"""Layers that read the same tensor give what they gave apart, in whatever order they are asked."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dspark_train.target import Target
from dspark_train.target.cpu import can_pack, pack_linears, weight_bytes
from dspark_train.target.joining import JoinedLinear, join_linears

PACKS = can_pack(torch.float32, torch.device("cpu"))


class Three(nn.Module):
    """Two layers read one tensor, a third another."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4, bias=bias), nn.Linear(8, 6, bias=bias)
        self.third = nn.Linear(8, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.third(x + 1) + self.second(x)[..., :4]


def joined(module: nn.Module) -> set[str]:
    return {name for name, m in module.named_modules() if isinstance(m, JoinedLinear)}


@pytest.mark.parametrize(
    "packed", [False, pytest.param(True, marks=pytest.mark.skipif(not PACKS, reason="no layout"))]
)
@pytest.mark.parametrize("bias", [False, True])
def test_what_reads_the_same_is_joined(bias: bool, packed: bool) -> None:
    model, x = Three(bias), torch.randn(2, 3, 8)
    expected, weights = model(x).detach(), model.second.weight.detach().clone()
    size = weight_bytes(model)
    join_linears(model, lambda: model(torch.ones(1, 2, 8)))
    if packed:
        pack_linears(model)
    assert joined(model) == {"first", "second"}
    assert torch.equal(model.second.weight, weights)
    assert weight_bytes(model) == size
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_any_order_and_any_input() -> None:
    model, x, y = Three(), torch.randn(3, 8), torch.randn(3, 8)
    layers = {"first": model.first, "second": model.second}
    join_linears(model, lambda: model(x))
    for name, given in [("second", x), ("second", x), ("first", y), ("second", x), ("first", x)]:
        torch.testing.assert_close(getattr(model, name)(given), layers[name](given))
    model.first(x)
    x.zero_()  # the same tensor, but the first layer has been asked already
    torch.testing.assert_close(model.first(x), layers["first"](x))


@torch.no_grad()
def test_threads_do_not_meet() -> None:
    """Two threads with tensors of their own, one between the two layers of the other."""
    model, x, y = Three(), torch.randn(3, 8), torch.randn(3, 8)
    expected, other = model(x), model(y)
    join_linears(model, lambda: model(x))
    first, found = model.first(x), []

    def another() -> None:
        with torch.no_grad():
            found.append(model(y))

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    whole = first * model.third(x + 1) + model.second(x)[..., :4]
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(found[0], other)


class Writes(Three):
    """Writes into its input between two layers that read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first = self.first(x)
        x.zero_()
        return first + self.second(x)[..., :4]


class Reshapes(Three):
    """Wants outputs that lie in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).view(-1)[:8] + self.second(x).view(-1)[:8]


class Twice(Three):
    """Asks a layer twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)[..., :4] + self.second(x + 1)[..., 2:]


@pytest.mark.parametrize("kind", [Writes, Reshapes, Twice])
@torch.no_grad()
def test_what_cannot_be_joined_stays_as_it_was(kind: type[Three]) -> None:
    model, x = kind(), torch.randn(2, 8)
    expected, layers = model(x), list(model.children())
    join_linears(model, lambda: model(x))
    assert not joined(model)
    assert all(a is b for a, b in zip(model.children(), layers, strict=True))
    assert torch.equal(model(x), expected)


@pytest.mark.skipif(not PACKS, reason="no packed layout on this CPU")
def test_a_packed_target_joins_its_projections(random_target: Callable[..., Target]) -> None:
    target = random_target()
    target.pack()
    names = {name.split(".")[-1] for name in joined(target.model)}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
