"""Packed weights and grouped attention give what the layers they replace give."""

import platform
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.target import Target
from dspark_train.target.cpu import (
    PackedLinear,
    can_pack,
    fast_dtype,
    fits_float16,
    grouped_attention,
    pack_linears,
    weight_bytes,
)

CPU = torch.device("cpu")
# what this CPU can pack
PACKABLE = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (64,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rounded", [True, False])
def test_packed_linear(
    rows: tuple[int, ...], bias: bool, dtype: torch.dtype, rounded: bool
) -> None:
    """Weights that were bfloat16 once, which may take the shorter layout, and others."""
    torch.manual_seed(0)
    dense = nn.Linear(96, 40, bias=bias, dtype=dtype)
    x = torch.randn(*rows, 96).to(dtype)
    with torch.no_grad():
        if rounded:
            dense.weight.copy_(dense.weight.bfloat16())
            dense.weight[0, :2] = torch.tensor([2.0**-17, 65280.0])
        packed = PackedLinear(dense)
        expected = F.linear(
            x.double(), dense.weight.double(), dense.bias.double() if bias else None
        )
    assert packed(x).shape == (*rows, 40)
    # at most one rounding to bfloat16 of a sum in float32
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(packed(x).double(), expected, rtol=rtol, atol=1e-5)
    assert torch.equal(packed.weight, dense.weight)


def test_what_float16_holds() -> None:
    assert fits_float16(torch.tensor([2.0**-17 * 1.9921875, -65280.0, 1e-9]).bfloat16())
    assert not fits_float16(torch.tensor([7e4]).bfloat16())
    assert not fits_float16(torch.tensor([0.1]))


@pytest.mark.parametrize("dtype", PACKABLE)
def test_packing_replaces_every_linear_layer_and_counts_its_bytes(dtype: torch.dtype) -> None:
    drafter = Drafter(DrafterConfig(hidden_size=32, target_layer_ids=[0, 1])).to(dtype)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter)  # zeros would take the shorter layout
    before = sum(p.nbytes for p in drafter.parameters())
    pack_linears(drafter)
    assert not [m for m in drafter.modules() if type(m) is nn.Linear]
    assert weight_bytes(drafter) == before


@pytest.mark.parametrize(("dtype", "device"), [("float64", "cpu"), ("bfloat16", "meta")])
def test_what_is_not_packed(dtype: str, device: str) -> None:
    assert not can_pack(getattr(torch, dtype), torch.device(device))


@pytest.mark.parametrize("has", [True, False])
def test_auto_is_bfloat16_only_where_the_hardware_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert fast_dtype(CPU) == (torch.bfloat16 if has else torch.float32)
    assert fast_dtype(torch.device("meta")) == torch.bfloat16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_grouped_attention(queries: int, masked: bool) -> None:
    """By hand: every query head against the key head of its group."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, queries, 8), torch.randn(2, 3, 10, 8)
    value = torch.randn(2, 3, 10, 8)
    module, ungrouped = nn.Module(), nn.Module()
    for one, groups in ((module, 2), (ungrouped, 1)):
        one.is_causal, one.num_key_value_groups = False, groups
    mask = torch.zeros(2, 1, queries, 10)
    if masked:
        mask = mask.masked_fill(torch.rand(mask.shape) < 0.4, float("-inf"))
        mask[..., 0] = 0
    given = mask if masked else None
    grouped_attention(ungrouped, query[:, :3], key, value, given, 0.3)  # the layer before
    result, _ = grouped_attention(module, query, key, value, given, 0.3)
    for head in range(6):
        scores = query[:, head] @ key[:, head // 2].transpose(-1, -2) * 0.3 + mask[:, 0]
        expected = scores.softmax(-1) @ value[:, head // 2]
        torch.testing.assert_close(result[:, :, head], expected)


@pytest.mark.parametrize("dtype", PACKABLE)
def test_a_packed_target_is_the_same_target(
    random_target: Callable[..., Target], dtype: torch.dtype
) -> None:
    plain = Target.wrap(random_target(vocab_size=50).model.to(dtype))
    packed = Target.wrap(random_target(vocab_size=50).model.to(dtype))
    before = packed.fingerprint()
    packed.pack()
    assert packed.packed
    assert packed.fingerprint() == before == plain.fingerprint()
    ids = torch.randint(50, (2, 7))
    expected, found = (t.forward(ids, taps=(0, 1)) for t in (plain, packed))
    near = 0.05 if dtype == torch.bfloat16 else 1e-3
    for name in ("last_hidden", "features"):
        one, other = getattr(expected, name), getattr(found, name)
        torch.testing.assert_close(one, other, rtol=near, atol=near)
    hidden = expected.last_hidden
    torch.testing.assert_close(plain.head.logits(hidden), packed.head.logits(hidden))
    # training still gets gradients through the head
    leaf = hidden.clone().requires_grad_()
    packed.head.logits(leaf).sum().backward()
    assert leaf.grad is not None
    ids = torch.arange(0, 50, 7)
    part, whole = packed.head.restricted(ids).logits(hidden), packed.head.logits(hidden)
    torch.testing.assert_close(part, whole[..., ids])
