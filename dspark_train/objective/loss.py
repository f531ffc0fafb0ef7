"""The reference loss: it holds full logits for every proposal, and is written to be read."""

import torch
from torch.nn import functional as F

from dspark_train.objective.divergences import distance, measure
from dspark_train.objective.states import BlockStates
from dspark_train.objective.terms import LossTerms, ObjectiveWeights, assemble
from dspark_train.target.head import TargetHead


def reference_loss(
    states: BlockStates, head: TargetHead, w2: torch.Tensor | None, weights: ObjectiveWeights
) -> LossTerms:
    """Distance of the draft to token and target, BCE of the confidence to the overlap.

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
        target_logits = target_logits / weights.label_temperature
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    draft_logits, target_logits = draft_logits.to(wide), target_logits.to(wide)
    labels = states.labels * states.supervised
    found = measure(draft_logits, target_logits, labels, weights)
    label_logit = draft_logits.gather(-1, labels[..., None]).squeeze(-1)
    return assemble(
        states,
        weights,
        distance=distance(found, states.supervised, weights),
        ce=found.ce,
        l1=found.l1,
        correct=label_logit >= draft_logits.amax(-1),
    )
