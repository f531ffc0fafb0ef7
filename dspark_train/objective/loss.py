"""The reference loss: it holds full logits for every proposal, and is written to be read."""

import torch
from torch.nn import functional as F

from dspark_train.objective.states import BlockStates
from dspark_train.objective.terms import LossTerms, ObjectiveWeights, assemble, slot_weights
from dspark_train.target.head import TargetHead


def reference_loss(
    states: BlockStates, head: TargetHead, w2: torch.Tensor | None, weights: ObjectiveWeights
) -> LossTerms:
    """CE to the token, L1 to the target's distribution, BCE of the confidence to the overlap.

    Args:
        states: the drafter's states at every proposal.
        head: the target's LM head, shared by both sides.
        w2: `[V, R]` output matrix of the sequential head, or None without one.
        weights: of the terms.
    """
    draft_logits = head.logits(states.hidden)
    if states.latents is not None:
        draft_logits = draft_logits + F.linear(states.latents, w2)
    with torch.no_grad():
        target_logits = head.logits(states.target_hidden)[states.target_rows]
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_draft = draft_logits.to(wide).log_softmax(-1)
    target_probs = target_logits.to(wide).softmax(-1)

    labels = states.labels * states.supervised
    ce = F.nll_loss(log_draft.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    l1 = (log_draft.exp() - target_probs).abs().sum(-1)
    weight = slot_weights(states.supervised, weights.loss_decay)
    return assemble(
        states,
        weights,
        distance=(weight * (weights.ce * ce + weights.tv * l1)).sum(),
        ce=ce,
        l1=l1,
        correct=log_draft.gather(-1, labels[..., None]).squeeze(-1) >= log_draft.amax(-1),
    )
