"""A DFlash drafter for transformers: `generate(assistant_model=…, speculation_type="dflash")`."""

from pathlib import Path

import torch
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput

from dspark_train.drafter import Drafter
from dspark_train.formats.destinations import refuse_uncarried
from dspark_train.formats.reading import load_drafter


class DFlashAssistant(Drafter):
    """Our DFlash drafter behind the interface of transformers' assistants."""

    @classmethod
    def load(cls, source: str | Path, dtype: torch.dtype | None = None) -> "DFlashAssistant":
        """From a checkpoint of any layout that holds a plain DFlash drafter.

        Raises:
            ValueError: as `load_drafter`; or a drafter of another kind, for whose heads
                transformers has no place.
        """
        drafter = load_drafter(source, dtype)
        refuse_uncarried("transformers", drafter.config)
        assistant = cls(drafter.config).to(drafter.dtype)
        kept = {
            name: tensor
            for name, tensor in drafter.state_dict().items()
            if not name.startswith("confidence_head")
        }
        assistant.load_state_dict(kept, strict=False)
        return assistant.eval()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache,
    ) -> BaseModelOutput:
        """One block.

        Args:
            noise_embeds: `[1, K, D]` embeddings of anchor and mask tokens.
            context_hidden_states: `[1, n, M·D]` features of the positions that are new.
            position_ids: `[1, n + K]` of both.
            attention_mask: ones; there is one request and no padding.
            cache: of context and block. The caller cuts the last K positions off before it calls
                again, so K empty ones are put behind the context.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("padding in attention_mask: expected one prompt without padding")
        slots, new = noise_embeds.shape[1], context_hidden_states.shape[1]
        context = []
        pairs = self.context_kv(context_hidden_states.to(self.dtype), position_ids[:, :new])
        for layer, pair in enumerate(pairs):
            room = [x.new_zeros((*x.shape[:2], slots, x.shape[3])) for x in pair]
            both = [torch.cat(part, dim=2) for part in zip(pair, room, strict=True)]
            keys, values = cache.update(*both, layer)
            context.append((keys[:, :, :-slots], values[:, :, :-slots]))
        hidden = self.backbone(
            noise_embeds[:, None].to(self.dtype), position_ids[:, None, new:], context
        )
        return BaseModelOutput(last_hidden_state=hidden[:, 0])
