"""DFlash2's dynamic convolution inside a block: slots mix with those just before them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from dspark_train.drafter.config import DrafterConfig


class BlockConvolution(nn.Module):
    """Grouped dynamic causal convolution over the slots of a block, around a sublayer (DFlash2).

    With x the sublayer's normed input and `Δ = P x`, side s of tap t and channel c has the weight
    `base[s, t, c] + Δ[s, t, ⌊c/g⌋]`; side 0 filters the input, side 1 the output, both with the Δ
    of the input. Before the block there are zeros. It starts as the identity.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        width = config.hidden_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self.taps * (width // self.group), bias=False)
        self.reset()

    def reset(self) -> None:
        """Make it the identity."""
        with torch.no_grad():
            nn.init.zeros_(self.kernel_projection.weight)
            nn.init.zeros_(self.base_kernel)
            self.base_kernel[:, 0] = 1.0

    def around(
        self, sublayer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """`sublayer` of normed block states `[B, A, K, D]`, filtered on both sides."""
        change = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        inner = self._filter(x, 0, change)
        return self._filter(sublayer(inner), 1, change)

    def _filter(self, x: torch.Tensor, side: int, change: torch.Tensor) -> torch.Tensor:
        slots, result = x.shape[-2], torch.zeros_like(x)
        for tap in range(self.taps):
            per_channel = change[..., side, tap, :].repeat_interleave(self.group, dim=-1)
            shifted = F.pad(x[..., : max(0, slots - tap), :], (0, 0, min(tap, slots), 0))
            result = result + (self.base_kernel[side, tap] + per_channel) * shifted
        return result
