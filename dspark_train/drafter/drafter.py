"""The drafter as in the papers: inject the target's features, run one block in parallel.

One forward serves training and decoding: training gives it many blocks and a mask, decoding one
block and a cache of the same context keys and values.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from dspark_train.blocks import ContextSpan
from dspark_train.drafter.attention import RMSNorm, Rotary
from dspark_train.drafter.backbone import DrafterLayer
from dspark_train.drafter.confidence import ConfidenceHead
from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.convolution import BlockConvolution
from dspark_train.drafter.markov import GatedMarkovHead, MarkovHead
from dspark_train.drafter.rnn import RnnMarkovHead
from dspark_train.drafter.selector import CandidateSelector
from dspark_train.drafter.two_part import KeysValues
from dspark_train.drafter.visibility import Visibility

MARKOV_CLASSES = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
    "selector": CandidateSelector,
}


class Drafter(PreTrainedModel):
    """DFlash / DSpark drafter. Embedding and LM head belong to the target and are not in here."""

    config_class = DrafterConfig
    config: DrafterConfig
    base_model_prefix = ""
    _no_split_modules = ("DrafterLayer",)
    supports_gradient_checkpointing = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.slots = config.slots
        # "two_part", "flex" or "auto" (flex on CUDA): how, not what; no part of a checkpoint
        self.attention = "two_part"
        self.rotary = Rotary(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps, config.sandwich_norms)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps, config.sandwich_norms)
        kind = config.markov_head_type
        self.markov_head = MARKOV_CLASSES[kind](config) if kind else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        # target id = draft id + d2t[draft id]
        reduced = config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.int64) if reduced else None)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            std = getattr(module, "initial_std", self.config.initializer_range)
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, BlockConvolution):
            module.reset()

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target ids `[Vd]` of the tokens that can be drafted, None: all."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_only(self, ids: torch.Tensor) -> None:
        """Restrict drafting to target ids `[Vd]`, ascending."""
        self.d2t = ids - torch.arange(len(ids), device=ids.device)

    def draftable(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft ids of target `ids` `[...]`, and where there is one (bool)."""
        if self.d2t is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        known = self.draft_ids
        place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return place, known[place] == ids

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """Keys and values of context positions for every layer (computed once, then cached).

        Args:
            features: `[B, S, M·D]` concatenated outputs of the tapped target layers.
            positions: `[B, S]` true positions.

        Returns:
            Per layer, keys and values `[B, Hkv, S, d]`.
        """
        context = self.hidden_norm(self.fc(features))
        rotation = self.rotary(positions)
        return [layer.self_attn.keys_values(context, rotation) for layer in self.layers]

    def backbone(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        context: list[KeysValues],
        span: ContextSpan | None = None,
    ) -> torch.Tensor:
        """Run blocks in parallel.

        Args:
            embeddings: `[B, A, K, D]` target embeddings of the block inputs.
            positions: `[B, A, K]` true positions of the slots.
            context: per layer keys and values `[B, Hkv, S, d]`, from `context_kv`.
            span: what each block may see of the context; None: all of it, position by position.

        Returns:
            Post-norm hidden states `[B, A, K, D]`.
        """
        rotation, hidden = self.rotary(positions), embeddings
        visible = Visibility(positions, context[0][0].shape[2], span, self.attention)
        for layer, sight, keys_values in zip(self.layers, self.config.sights, context, strict=True):
            hidden = layer(hidden, rotation, visible.cut(keys_values, sight), visible.mask(sight))
        return self.norm(hidden)
