"""One layer of the backbone: block attention and a gated MLP, pre-norm."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from dspark_train.drafter.attention import BlockAttention, Mask, RMSNorm, Rotation
from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.convolution import BlockConvolution
from dspark_train.drafter.two_part import KeysValues


class GatedMLP(nn.Module):
    """`down(act(gate x) ⊙ up x)`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(GradientCheckpointingLayer):
    """A draft layer. The context enters by its keys and values only, without the layer's norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        if config.conv_kernel_size:
            self.attention_conv = BlockConvolution(config)
            self.mlp_conv = BlockConvolution(config)
        self.convolves = bool(config.conv_kernel_size)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: KeysValues,
        mask: Mask,
    ) -> torch.Tensor:
        """Block states `[B, A, K, D]` to block states of the same shape."""

        def attend(states: torch.Tensor) -> torch.Tensor:
            return self.self_attn(states, rotation, context, mask)

        if self.convolves:
            x = x + self.attention_conv.around(attend, self.input_layernorm(x))
            return x + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(x))
        x = x + attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))
