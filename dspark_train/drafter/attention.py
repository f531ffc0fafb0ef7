"""Block attention: a block reads the context before its anchor, and itself in both directions."""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark_train.drafter.config import DrafterConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
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

    Scores against context and own block share one softmax; the square of all slots against all
    slots and context is never built, so compute grows linearly with the number of blocks.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> KeysValues:
        """Keys (normed, rotated) and values `[..., Hkv, N, d]` of states `[..., N, D]`."""
        heads = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(heads)), rotation)
        return keys.transpose(-3, -2), self.v_proj(x).view(heads).transpose(-3, -2)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: KeysValues,
        context_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from every slot.

        Args:
            x: `[B, A, K, D]` normed block states.
            rotation: angles `[B, A, K, d]` of the slots.
            context: keys and values `[B, Hkv, S, d]`.
            context_mask: `[B, A, S]` bool, or None where all of the context is visible.

        Returns:
            `[B, A, K, D]`.
        """
        B, A, K, _ = x.shape
        H, d, S = self.kv_heads, self.head_dim, context[0].shape[2]
        G = self.heads // H
        queries = rotate(self.q_norm(self.q_proj(x).view(B, A, K, -1, d)), rotation)
        # [B, A, H, G·K, d]: the query heads of one KV head side by side
        queries = (
            queries.view(B, A, K, H, G, d).permute(0, 1, 3, 4, 2, 5).reshape(B, A, H, G * K, d)
        )
        keys, values = self.keys_values(x, rotation)

        over_context = queries.transpose(1, 2).reshape(B, H, A * G * K, d)
        context_scores = (over_context @ context[0].to(queries.dtype).transpose(-1, -2)).view(
            B, H, A, G * K, S
        )
        block_scores = (queries @ keys.transpose(-1, -2)).transpose(1, 2)
        scores = torch.cat((context_scores, block_scores), dim=-1).float() * d**-0.5
        if context_mask is not None:
            hidden = ~context_mask[:, None, :, None, :]
            scores[..., :S] = scores[..., :S].masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1).to(values.dtype)

        from_context = weights[..., :S].reshape(B, H, A * G * K, S) @ context[1].to(values.dtype)
        from_block = weights[..., S:].transpose(1, 2) @ values
        mixed = from_context.view(B, H, A, G, K, d).permute(0, 2, 4, 1, 3, 5) + from_block.view(
            B, A, H, G, K, d
        ).permute(0, 1, 4, 2, 3, 5)
        return self.o_proj(mixed.reshape(B, A, K, -1))
