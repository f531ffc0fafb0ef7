"""What the slots of a block may see: of the context, and of their own block."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sight:
    """How far the slots of a layer see.

    Attributes:
        window: positions that a sliding layer sees; None: as far back as the document goes.
        from_anchor: whether the window is that many positions before the anchor, the same for all
            slots (speculators), instead of those up to each slot, itself and its block among them.
        causal: whether slots see their own block up to themselves, instead of all of it.
    """

    window: int | None = None
    from_anchor: bool = False
    causal: bool = False

    def first(self, anchor: int) -> int:
        """First position that any slot of a block sees."""
        if self.window is None:
            return 0
        return max(0, anchor - self.window + (0 if self.from_anchor else 1))

    def sees_all(self, before: int, block_size: int) -> bool:
        """Whether every slot of a block sees all of the `before` positions before its anchor."""
        if self.window is None:
            return True
        return before + (0 if self.from_anchor else block_size) <= self.window


@dataclass(frozen=True)
class ContextSpan:
    """The context positions of each block: its own document, strictly before its anchor.

    Attributes:
        starts: `[B, A]` first position of the anchor's document in the row.
        ends: `[B, A]` position of the anchor in the row, which is not seen any more.
    """

    starts: torch.Tensor
    ends: torch.Tensor

    def lowest(self, positions: torch.Tensor, sight: Sight) -> torch.Tensor:
        """First position `[B, A, K]` in the row that each slot sees.

        Args:
            positions: `[B, A, K]` true positions of the slots in their documents.
            sight: of the layer.
        """
        if sight.window is None:
            return self.starts[..., None].expand(positions.shape)
        if sight.from_anchor:
            first = (positions[..., :1] - sight.window).expand(positions.shape)
        else:
            first = positions - sight.window + 1
        return self.starts[..., None] + first.clamp(min=0)

    def mask(
        self, context_length: int, positions: torch.Tensor, sight: Sight | None = None
    ) -> torch.Tensor:
        """`[B, A, K, S]` bool, true where a slot attends; `[B, A, 1, S]` if all see the same."""
        sight = sight or Sight()
        alike = sight.window is None or sight.from_anchor
        lowest = self.lowest(positions[..., :1] if alike else positions, sight)
        at = torch.arange(context_length, device=self.ends.device)
        return (at >= lowest[..., None]) & (at < self.ends[..., None, None])
