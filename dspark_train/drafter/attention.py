"""Block attention: a block reads the context before its anchor, and itself."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.flex import flex_attend
from dspark_train.drafter.two_part import KeysValues, PartMask, two_part_attend

Rotation = tuple[torch.Tensor, torch.Tensor]
Mask = PartMask | BlockMask


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` over its root mean square in the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in float32.

    Qwen's rounds to the dtype of `x` before its weight is applied, Gemma's (`wide`) after.
    """

    def __init__(self, size: int, eps: float, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.wide = eps, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = unit_rms(x, self.eps)
        if self.wide:
            return (self.weight.float() * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class Rotary:
    """Rotary angles at given positions. Holds no parameters and no buffers."""

    def __init__(self, config: DrafterConfig) -> None:
        kind = config.rope_parameters.get("rope_type", "default")
        if kind == "default":
            # explicit: loading sets the default dtype to the weights', bf16 angles would be off
            pairs = torch.arange(0, config.head_dim, 2, device="cpu", dtype=torch.float32)
            exponent = pairs / config.head_dim
            self.frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponent
            self.scale = 1.0
        else:
            with torch.device("cpu"):  # a model that is being loaded is built without memory
                self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """cos and sin `[..., d]` in float32 at integer `positions` `[...]`."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate `x` `[..., N, H, d]` by angles `[..., N, d]`, shared by the heads."""
    cos, sin = (part[..., None, :].to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class BlockAttention(nn.Module):
    """KV injection (DFlash, section 3): keys and values `[W H ; W X]`, queries from X only.

    How context and own block come under one softmax without the square of all slots against all
    slots is the affair of `two_part.py` and `flex.py`, which agree.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = None
        if not config.keys_are_values:
            self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.sandwich_norms)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.sandwich_norms)
        self.value_norm = config.value_norm

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> KeysValues:
        """Keys (normed, rotated) and values `[..., Hkv, N, d]` of states `[..., N, D]`."""
        heads = (*x.shape[:-1], self.kv_heads, self.head_dim)
        projected = self.k_proj(x).view(heads)
        keys = rotate(self.k_norm(projected), rotation)
        values = projected if self.v_proj is None else self.v_proj(x).view(heads)
        if self.value_norm:
            values = unit_rms(values, self.k_norm.eps).to(values.dtype)
        return keys.transpose(-3, -2), values.transpose(-3, -2)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, context: KeysValues, mask: Mask
    ) -> torch.Tensor:
        """Attend from every slot.

        Args:
            x: `[B, A, K, D]` normed block states.
            rotation: angles `[B, A, K, d]` of the slots.
            context: keys and values `[B, Hkv, S, d]`.
            mask: of the context and of the blocks; as a block mask it takes FlexAttention.

        Returns:
            `[B, A, K, D]`.
        """
        heads = (*x.shape[:-1], self.heads, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(x).view(heads)), rotation)
        own = self.keys_values(x, rotation)
        attend = flex_attend if isinstance(mask, BlockMask) else two_part_attend
        return self.o_proj(attend(queries, context, own, mask, self.scale).flatten(-2))
