"""Which mask a layer gets: one per window, made once per pass."""

import torch

from dspark_train.blocks import ContextSpan
from dspark_train.drafter.attention import Mask
from dspark_train.drafter.flex import flex_mask
from dspark_train.drafter.two_part import KeysValues


class Visibility:
    """What the slots of one pass see of the context, for every window that its layers have.

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
        self._masks: dict[int | None, Mask] = {}

    def cut(self, context: KeysValues, window: int | None) -> KeysValues:
        """The context `[B, Hkv, S, d]`, without what no slot sees where all rows end alike."""
        first = self._first(window)
        return context if first == 0 else tuple(part[:, :, first:] for part in context)

    def mask(self, window: int | None) -> Mask:
        """The mask over what `cut` leaves, None where all of it is visible."""
        if window not in self._masks:
            self._masks[window] = self._make(window)
        return self._masks[window]

    def _first(self, window: int | None) -> int:
        # slot 0 sits at S, so it sees nothing before S - window + 1, and later slots less
        return 0 if self.span or window is None else max(0, self.length - window + 1)

    def _make(self, window: int | None) -> Mask:
        span, first = self.span, self._first(window)
        if span is None:
            if window is None or self.length + self.positions.shape[2] <= window:
                return None
            ends = self.positions.new_full(self.positions.shape[:2], self.length)
            span = ContextSpan(torch.zeros_like(ends), ends)
        if self.flex:
            return flex_mask(span.lowest(self.positions, window), span.ends, self.length)
        return span.mask(self.length, self.positions, window)[..., first:]
