"""Which mask a layer gets: one for all layers of the same sight, made once per pass."""

import torch

from dspark_train.blocks import ContextSpan, Sight
from dspark_train.drafter.attention import Mask
from dspark_train.drafter.flex import flex_mask
from dspark_train.drafter.two_part import KeysValues, PartMask


class Visibility:
    """What the slots of one pass see, for every sight that its layers have.

    Args:
        positions: `[B, A, K]` true positions of the slots.
        context_length: S.
        span: of every block; None: all blocks see all S positions, which are 0 to S - 1 of one
            document, as in decoding.
        attention: "two_part", "flex" or "auto" (flex on CUDA where there is a span).
    """

    def __init__(
        self,
        positions: torch.Tensor,
        context_length: int,
        span: ContextSpan | None,
        attention: str = "two_part",
    ) -> None:
        self.positions, self.length, self.span = positions, context_length, span
        self.flex = span is not None and (
            attention == "flex" or (attention == "auto" and positions.is_cuda)
        )
        self._masks: dict[Sight, Mask] = {}

    def cut(self, context: KeysValues, sight: Sight) -> KeysValues:
        """The context `[B, Hkv, S, d]`, without what no slot sees where all rows end alike."""
        first = self._first(sight)
        return context if first == 0 else tuple(part[:, :, first:] for part in context)

    def mask(self, sight: Sight) -> Mask:
        """The mask over what `cut` leaves, and over the blocks themselves."""
        if sight not in self._masks:
            self._masks[sight] = self._make(sight)
        return self._masks[sight]

    def _first(self, sight: Sight) -> int:
        return 0 if self.span else sight.first(self.length)

    def _make(self, sight: Sight) -> Mask:
        span, first = self.span, self._first(sight)
        if span is None:
            if sight.sees_all(self.length - first, self.positions.shape[2]):
                return PartMask(None, sight.causal)
            ends = self.positions.new_full(self.positions.shape[:2], self.length)
            span = ContextSpan(torch.zeros_like(ends), ends)
        if self.flex:
            lowest = span.lowest(self.positions, sight)
            return flex_mask(lowest, span.ends, self.length, sight.causal)
        context = span.mask(self.length, self.positions, sight)[..., first:]
        return PartMask(context, sight.causal)
