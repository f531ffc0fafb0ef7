"""The reference loss: position-decayed CE, TV and confidence terms (DSpark, eq. 5 to 8).

It holds full logits, one row of the vocabulary per proposal, and is written to be read. Each term
is a numerator and a denominator, so that any number of ranks and micro-batches adds up to the same
loss: sum both over all of them, then divide.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dspark_train.objective.acceptance import overlap


@dataclass(frozen=True)
class ObjectiveWeights:
    """`loss = ce·CE + tv·‖draft - target‖₁ + confidence·BCE`, slot k weighted `exp(-k/loss_decay)`.

    The L1 norm is not halved.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    loss_decay: float = 4.0


@dataclass(frozen=True)
class LossTerms:
    """Sums over the supervised proposals of one batch.

    Attributes:
        ce, tv, confidence: scalar numerators, each `Σ w_k · term`.
        weight: scalar `Σ w_k`, the denominator of all three.
        acceptance: `[P]` sum of overlaps per proposal index (no gradient).
        correct: `[P]` how often the draft's argmax is the label (no gradient).
        confidence_error: `[P]` sum of |confidence - overlap| (no gradient).
        supervised: `[P]` supervised proposals per index.
        expected_length, blocks: summed τ of blocks with a label, and their number.
    """

    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    weight: torch.Tensor
    acceptance: torch.Tensor
    correct: torch.Tensor
    confidence_error: torch.Tensor
    supervised: torch.Tensor
    expected_length: torch.Tensor
    blocks: torch.Tensor

    def total(self, weights: ObjectiveWeights, denominator: torch.Tensor) -> torch.Tensor:
        """The scalar loss, for the sum of `weight` over everything that shares this step."""
        numerator = (
            weights.ce * self.ce + weights.tv * self.tv + weights.confidence * self.confidence
        )
        return numerator / denominator.clamp(min=1e-6)


def drafter_loss(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    loss_decay: float,
) -> LossTerms:
    """Loss terms and acceptance metrics of a batch of blocks.

    Args:
        draft_logits: `[N, P, V]`, sequential head included, teacher-forced.
        target_logits: `[N, P, V]`, the target's at the position before each label.
        labels: `[N, P]` token ids (anything where not supervised).
        supervised: `[N, P]` bool, a prefix per block.
        confidence_logits: `[N, P]` or None.
        loss_decay: slots over which the weight falls by e.
    """
    proposals = labels.shape[-1]
    slot = torch.arange(proposals, device=labels.device, dtype=torch.float32)
    weight = torch.exp(-slot / loss_decay) * supervised

    log_draft = draft_logits.float().log_softmax(-1)
    draft_probs = log_draft.exp()
    target_probs = target_logits.float().softmax(-1)
    ce = F.nll_loss(
        log_draft.flatten(0, 1), labels.flatten() * supervised.flatten(), reduction="none"
    ).view_as(weight)
    l1 = (draft_probs - target_probs).abs().sum(-1)

    accepted = overlap(draft_probs, target_probs).detach() * supervised
    if confidence_logits is None:
        bce = error = torch.zeros_like(weight)
    else:
        bce = F.binary_cross_entropy_with_logits(
            confidence_logits.float(), accepted, reduction="none"
        )
        error = (confidence_logits.float().sigmoid() - accepted).abs().detach() * supervised
    alive = supervised[:, 0]
    return LossTerms(
        ce=(weight * ce).sum(),
        tv=(weight * l1).sum(),
        confidence=(weight * bce).sum(),
        weight=weight.sum(),
        acceptance=accepted.sum(0),
        correct=((log_draft.argmax(-1) == labels) & supervised).sum(0),
        confidence_error=error.sum(0),
        supervised=supervised.sum(0),
        expected_length=((1.0 + accepted.cumprod(-1).sum(-1)) * alive).sum(),
        blocks=alive.sum(),
    )
