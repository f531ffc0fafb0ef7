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
    """A draft layer. The context enters by its keys and values only, without the layer's norm.

    With `sandwich_norms` it is Gemma's: what a sublayer gives is normed, too, before it is added,
    and the layer's output has a scalar, which is not trained. `post_attention_layernorm` is then
    that of the attention's output, in Qwen's layers that of the MLP's input.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size = (config.hidden_size, config.rms_norm_eps, config.sandwich_norms)
        self.input_layernorm = RMSNorm(*size)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(*size)
        self.mlp = GatedMLP(config)
        self.sandwiched = config.sandwich_norms
        if self.sandwiched:
            self.pre_feedforward_layernorm = RMSNorm(*size)
            self.post_feedforward_layernorm = RMSNorm(*size)
            self.register_buffer("layer_scalar", torch.ones(1))
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

        if self.sandwiched:
            x = x + self.post_attention_layernorm(attend(self.input_layernorm(x)))
            fed = self.mlp(self.pre_feedforward_layernorm(x))
            return (x + self.post_feedforward_layernorm(fed)) * self.layer_scalar
        if self.convolves:
            x = x + self.attention_conv.around(attend, self.input_layernorm(x))
            return x + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(x))
        x = x + attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))
