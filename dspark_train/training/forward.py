"""The masked training forward: many blocks of many documents in one pass (DSpark, section 3).

This is the whole method in the order of the papers: inject the context, run the blocks, add the
sequential head, read the confidence, and line all of it up with the target's own distributions.
"""

import torch

from dspark_train.blocks import ContextSpan
from dspark_train.data.batch import Batch
from dspark_train.drafter import Drafter
from dspark_train.objective import BlockStates
from dspark_train.target.head import TargetHead


def block_hidden(drafter: Drafter, head: TargetHead, batch: Batch) -> torch.Tensor:
    """Hidden states `[B, A, P, D]` of the proposing slots of every block."""
    slots = drafter.slots
    features = batch.features
    if not torch.is_autocast_enabled(features.device.type):
        features = features.to(next(drafter.parameters()).dtype)  # a store may be coarser
    context = drafter.context_kv(features, batch.positions)
    tokens = slots.inputs(batch.input_ids.gather(1, batch.anchors), drafter.config.mask_token_id)
    hidden = drafter.backbone(
        head.embed(tokens),
        slots.positions(batch.anchors - batch.starts),
        context,
        ContextSpan(batch.starts, batch.anchors),
    )
    return hidden[:, :, slots.proposing]


def block_states(
    drafter: Drafter,
    head: TargetHead,
    batch: Batch,
    *,
    heads: bool = True,
    train_backbone: bool = True,
    confidence_trains_backbone: bool = True,
) -> BlockStates:
    """Run the drafter over a batch, teacher-forced; N = B·A blocks.

    Args:
        heads: apply the sequential and confidence heads that the drafter has.
        train_backbone: False computes the backbone without gradient.
        confidence_trains_backbone: whether the confidence loss may move the backbone and the
            predecessor's embedding.
    """
    slots = drafter.slots
    with torch.set_grad_enabled(torch.is_grad_enabled() and train_backbone):
        hidden = block_hidden(drafter, head, batch)

    reachable = batch.input_ids.shape[1] - 1
    labels_at = slots.label_positions(batch.anchors).clamp(max=reachable)
    before = slots.predecessor_positions(batch.anchors).clamp(max=reachable)

    def take(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return values.gather(1, positions.flatten(1)).view_as(positions)

    latents = embeddings = confidence_logits = None
    if heads and drafter.markov_head is not None:
        latents, embeddings = drafter.markov_head.latents(hidden, take(batch.input_ids, before))
        latents = latents.flatten(0, 1)
    if heads and drafter.confidence_head is not None:
        seen = (hidden, embeddings)
        if not confidence_trains_backbone:
            seen = tuple(None if part is None else part.detach() for part in seen)
        confidence_logits = drafter.confidence_head.logits(*seen).flatten(0, 1)

    # blocks overlap: what the target says at a position is kept once and shared
    used, rows = take(batch.hidden_rows, before).flatten(0, 1).unique(return_inverse=True)
    supervised = slots.supervised(batch.anchors, batch.ends, batch.loss_mask)
    # a label that cannot be drafted ends the block: nothing after it is ever reached
    labels, known = drafter.draftable(take(batch.input_ids, labels_at))
    supervised = supervised & known.cumprod(-1).bool()
    return BlockStates(
        hidden=hidden.flatten(0, 1),
        latents=latents,
        confidence_logits=confidence_logits,
        labels=labels.flatten(0, 1),
        supervised=(supervised & batch.keep[..., None]).flatten(0, 1),
        target_hidden=batch.last_hidden[used],
        target_rows=rows,
    )
