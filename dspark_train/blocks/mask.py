"""What a block may see of the context. Inside a block every slot sees every slot."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ContextSpan:
    """The context positions of each block: its own document, strictly before its anchor.

    Attributes:
        starts: `[B, A]` first position of the anchor's document in the row.
        ends: `[B, A]` position of the anchor in the row, which is not seen any more.
    """

    starts: torch.Tensor
    ends: torch.Tensor

    def lowest(self, positions: torch.Tensor, window: int | None) -> torch.Tensor:
        """First position `[B, A, K]` in the row that each slot sees.

        Args:
            positions: `[B, A, K]` true positions of the slots in their documents.
            window: a slot at t sees the W positions up to t, itself and its block among them;
                None: as far back as the document goes.
        """
        if window is None:
            return self.starts[..., None].expand(positions.shape)
        return self.starts[..., None] + (positions - window + 1).clamp(min=0)

    def mask(
        self, context_length: int, positions: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """`[B, A, K, S]` bool, true where a slot attends; `[B, A, 1, S]` without a window."""
        lowest = self.lowest(positions if window else positions[..., :1], window)
        at = torch.arange(context_length, device=self.ends.device)
        return (at >= lowest[..., None]) & (at < self.ends[..., None, None])
