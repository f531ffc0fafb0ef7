"""What makes a pass over a few tokens cheap on a CPU: packed weights and grouped attention.

Reading the weights is most of such a pass. They are read about twice as fast from a blocked layout
as from rows, and then five tokens cost little more than one, which is what verification lives on.
Two layouts are used: oneDNN's, and where the CPU has no products of bfloat16, FBGEMM's of float16
for weights that are bfloat16 or were so once: two bytes are read for each, widened in registers,
and summed in float32. Attention of few tokens is a product of few rows where the query heads that
share a key head are taken as queries of that head.
"""

import itertools
import platform
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dspark_train.target.packing import Packing

GROUPED = "sdpa_grouped"
# what a weight may lose in float16: less than sums in float32 lose
LOST = 2**-25
# queries of a row up to which its key heads are not copied for each of their query heads
SHORT = 64


def fast_dtype(device: torch.device) -> torch.dtype:
    """What `auto` is: bfloat16 where the hardware multiplies it, else float32.

    A CPU without such instructions emulates them, ten times slower than its float32.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    has = torch.cpu._is_avx512_bf16_supported if x86 else _onednn_has_bfloat16
    return torch.bfloat16 if device.type != "cpu" or has() else torch.float32


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has a packed product for weights of that kind."""
    onednn = torch.backends.mkldnn.is_available()
    bfloat16 = (onednn and _onednn_has_bfloat16()) or _fbgemm()
    known = {torch.float32: onednn, torch.bfloat16: bfloat16}
    return device.type == "cpu" and known.get(dtype, False)


def _onednn_has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _fbgemm() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def fits_float16(weight: torch.Tensor) -> bool:
    """Whether float16 holds a weight: all of bfloat16 from 2^-17 to 65504, and less for zero."""
    wide = weight.float()
    return bool((wide.half().float() - wide).abs().max() <= LOST)


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight is held in a packed layout only.

    Attributes:
        half: the layout is FBGEMM's of float16, else oneDNN's.

    Raises:
        ValueError: a weight that no layout of this CPU holds.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.nbytes = sum(p.nbytes for p in linear.parameters())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.number = torch.tensor(next(NUMBERS))
        LAYERS[int(self.number)] = self
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        native = weight.dtype == torch.bfloat16 and _onednn_has_bfloat16()
        self.half = not native and _fbgemm() and fits_float16(weight)
        if self.half:
            self.nbytes -= weight.nbytes - 2 * weight.numel()
            bias = None if self.bias is None else self.bias.float()
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        elif native or weight.dtype == torch.float32:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        else:
            raise ValueError(
                f"bfloat16 weights up to {float(weight.abs().max()):.0f} cannot be packed on this "
                "CPU, which holds 65504: set target.dtype=float32 or target.pack=false"
            )

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[out, in]`, unpacked anew at every call."""
        if self.half:
            weight, _ = torch.ops.quantized.linear_unpack_fp16(self.packed)
            return weight.to(self.dtype)
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` to `[..., out]`; no gradient passes."""
        if torch.compiler.is_compiling() or get_proxy_mode() is not None:
            return torch.ops.dspark_train.packed_linear(x, self.number, self.out_features)
        return self.product(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, by the kernel of the layout."""
        if self.half:
            return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed).to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


# by number, for traces: what a compiler is shown of a layout is an operation that it leaves alone
LAYERS: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()
NUMBERS = itertools.count()


OPERATIONS = torch.library.Library("dspark_train", "DEF")
OPERATIONS.define("packed_linear(Tensor x, Tensor number, int out_features) -> Tensor")


@torch.library.impl(OPERATIONS, "packed_linear", "CompositeExplicitAutograd")
def packed_linear(x: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    """The packed layer of a number: `x` `[..., in]` to `[..., out]`."""
    return LAYERS[int(number)].product(x)


@torch.library.register_fake("dspark_train::packed_linear", lib=OPERATIONS)
def _(x: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer inside a frozen `module`; the dense weights are let go."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the parameters of `module`, packed ones included."""
    packed = sum(m.nbytes for m in module.modules() if isinstance(m, PackedLinear))
    return packed + sum(p.nbytes for p in module.parameters())


class Repeated(threading.local):
    """The mask of a pass once for every query head of a key head; its layers share it."""

    mask: torch.Tensor | None = None
    rows: torch.Tensor

    def repeated(self, mask: torch.Tensor, times: int) -> torch.Tensor:
        """`[B, 1, q, S]` to `[B, 1, times·q, S]`."""
        if self.mask is not mask or self.rows.shape[2] != times * mask.shape[2]:
            self.mask, self.rows = mask, mask.repeat(1, 1, times, 1)
        return self.rows


LAST = Repeated()


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' "sdpa", with a short cut for few queries per row.

    Args:
        query: `[B, H, q, d]`; with `packing` `[1, H, N, d]`.
        key, value: `[B, Hkv, S, d]`.
        attention_mask: `[B or 1, 1, q, S]` or None.
        packing: how the queries of a packed pass lie; it is packed again afterwards.

    Returns:
        `[B, q, H, d]`, and None for the weights.
    """
    if packing is not None:
        query = packing.unpack_heads(query)
        mixed, _ = grouped_attention(module, query, key, value, attention_mask, scaling, **kwargs)
        return packing.pack(mixed), None
    B, H, q, d = query.shape
    masked = attention_mask is not None
    by_head = masked and attention_mask.shape[1] > 1
    if q > SHORT or (q > 1 and not masked) or by_head or kwargs.get("dropout"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    heads = key.shape[1]
    if q > 1 and heads < H:
        attention_mask = LAST.repeated(attention_mask, H // heads)
    mixed = F.scaled_dot_product_attention(
        query.reshape(B, heads, -1, d), key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(B, H, q, -1).transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
