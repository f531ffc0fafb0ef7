"""The target's input embedding and output head, as a drafter shares them."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from dspark_train.target.cpu import PackedLinear


class TargetHead(nn.Module):
    """Frozen embedding and LM head of a target; weights are shared with it, never copied.

    `logits` gives what the target itself gives for its final norm's output: the LM head, then the
    family's logit scale, then its soft-cap.

    Attributes:
        embedding: the target's own embedding module, which holds the scale of some families.
        projection: the target's own LM head, `weight` [V, D].
        embed_multiplier: factor the target's forward puts on the embeddings (1.0 for most).
        scale: factor on the raw logits (1.0 for most).
        soft_cap: c in `c · tanh(logits / c)`, or None.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the parts out of `model`.

        Raises:
            ValueError: if the model has no LM head.
        """
        super().__init__()
        config = model.config.get_text_config()
        projection = model.get_output_embeddings()
        if projection is None:
            raise ValueError(f"{type(model).__name__} has no LM head; a causal LM is needed")
        self.embedding = model.get_input_embeddings()
        self.projection = projection
        self.embed_multiplier = float(getattr(config, "embedding_multiplier", None) or 1.0)
        multiplied = float(getattr(config, "logit_scale", None) or 1.0)
        divided = float(getattr(config, "logits_scaling", None) or 1.0)
        self.scale = multiplied / divided
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._packed: PackedLinear | None = None
        self.requires_grad_(False)

    def pack(self) -> None:
        """Compute logits from a packed copy of the LM head where no gradient is asked for."""
        self._packed = PackedLinear(self.projection)

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, padding rows beyond the tokenizer included."""
        return self.projection.weight.shape[0]

    @property
    def facts(self) -> dict[str, float | None]:
        """How this head differs from a bare LM head, in the words of DFlash2's configuration."""
        scale = getattr(self.embedding, "embed_scale", 1.0)
        return {
            "output_multiplier": self.scale,
            "final_logit_softcapping": self.soft_cap,
            "input_embedding_scale": self.embed_multiplier * float(scale),
        }

    def restricted(self, ids: torch.Tensor) -> "TargetHead":
        """The same embedding with the LM head's rows of `ids` `[Vd]` only, copied."""
        rows = nn.Linear(self.projection.in_features, len(ids), device="meta")
        rows.weight = nn.Parameter(self.projection.weight[ids], requires_grad=False)
        bias = self.projection.bias
        rows.bias = None if bias is None else nn.Parameter(bias[ids], requires_grad=False)
        head = copy.copy(self)
        head._modules = self._modules | {"projection": rows, "_packed": None}
        if self._packed is not None:
            head.pack()
        return head

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token ids [...] to the vectors [..., D] that enter the target's first layer."""
        embedded = self.embedding(ids)
        return embedded if self.embed_multiplier == 1.0 else embedded * self.embed_multiplier

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Map the final norm's output [..., D] to logits [..., V] in the head's dtype."""
        projection = self.projection
        needs_gradient = torch.is_grad_enabled() and last_hidden.requires_grad
        same = last_hidden.dtype == projection.weight.dtype
        if self._packed is not None and same and not needs_gradient:
            projection = self._packed
        logits = projection(last_hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
