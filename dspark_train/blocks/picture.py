"""Pictures of slots and masks, drawn from the functions that training uses."""

from typing import TYPE_CHECKING

import torch

from dspark_train.blocks.mask import ContextSpan, Sight
from dspark_train.blocks.slots import BlockSlots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_slots(axes: "Axes", slots: BlockSlots, anchor: int = 5) -> None:
    """One block: what each slot reads, where it sits, and which position it proposes."""
    inputs = slots.inputs(torch.tensor(1), mask_token_id=0).tolist()
    positions = slots.positions(torch.tensor(anchor)).tolist()
    labels: list[int | None] = [None] * slots.block_size
    labels[slots.proposing] = slots.label_positions(torch.tensor(anchor)).tolist()
    for k, (token, position, label) in enumerate(zip(inputs, positions, labels, strict=True)):
        axes.text(position, 0, "anchor" if token else "mask", ha="center", va="center")
        axes.text(position, -0.55, f"slot {k}\nat {position}", ha="center", va="center", size=8)
        if label is None:
            axes.text(position, 1, "nothing", ha="center", va="center", color="grey")
        else:
            arrow = {"arrowstyle": "->", "color": "C0"}
            axes.annotate("", (label, 0.85), (position, 0.15), arrowprops=arrow)
            axes.text(label, 1, f"token {label}", ha="center", va="center", color="C0")
    convention = "DSpark" if slots.sample_from_anchor else "DFlash"
    axes.set(
        title=f"{convention}: {slots.num_proposals} proposals of {slots.block_size} slots",
        xlim=(anchor - 0.6, anchor + slots.block_size + 0.6),
        ylim=(-0.9, 1.3),
    )
    axes.axis("off")


def attention_picture(
    slots: BlockSlots,
    anchors: torch.Tensor,
    starts: torch.Tensor,
    context_length: int,
    sight: Sight | None = None,
) -> torch.Tensor:
    """What every slot attends to, as one matrix (training never builds it).

    Args:
        slots: the convention.
        anchors, starts: `[A]` anchors in a row, and where their documents start.
        context_length: S.
        sight: of the layer; None: without a window, blocks in both directions.

    Returns:
        `[A·K, S + A·K]` bool.
    """
    K, A = slots.block_size, len(anchors)
    positions = slots.positions(anchors - starts)[None]
    span = ContextSpan(starts[None], anchors[None])
    context = span.mask(context_length, positions, sight)[0].expand(A, K, context_length)
    own = torch.eye(A, dtype=torch.bool).repeat_interleave(K, 0).repeat_interleave(K, 1)
    if sight is not None and sight.causal:
        own = own.tril()
    return torch.cat((context.flatten(0, 1), own), dim=1)


def draw_attention(
    axes: "Axes", slots: BlockSlots, anchors: list[int], starts: list[int], context_length: int
) -> None:
    """The matrix of `attention_picture`: context to the left of the line, blocks to the right."""
    mask = attention_picture(slots, torch.tensor(anchors), torch.tensor(starts), context_length)
    axes.imshow(mask, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", interpolation="nearest")
    axes.axvline(context_length - 0.5, color="black")
    K = slots.block_size
    axes.set(
        title=f"anchors at {anchors}, documents from {sorted(set(starts))}",
        xlabel="context positions | slots of all blocks",
        ylabel="slot",
        yticks=[K * i for i in range(len(anchors))],
        yticklabels=[f"block {i}" for i in range(len(anchors))],
    )
