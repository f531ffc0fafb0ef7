"""The terms of the loss, and how per-proposal numbers become them (DSpark, eq. 5 to 8).

Each term is a numerator over one shared denominator, so that any number of ranks and micro-batches
adds up to the same loss: sum both over all of them, then divide.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dspark_train.objective.acceptance import expected_length
from dspark_train.objective.states import BlockStates


@dataclass(frozen=True)
class ObjectiveWeights:
    """Weights of what is summed to the loss; slot k counts `exp(-k/loss_decay)`.

    `ce` to the token, `tv` of the L1 norm (not halved), `kl` and `reverse_kl`, `log_overlap` of
    `-log overlap`, `blend` of KL and total variation, `length` of the negative expected accepted
    length (all defined in `divergences.distance`), and `confidence` of the confidence head's BCE.
    The target's distribution is that at `label_temperature`; below 1 it is sharper.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    loss_decay: float = 4.0
    kl: float = 0.0
    reverse_kl: float = 0.0
    log_overlap: float = 0.0
    blend: float = 0.0
    length: float = 0.0
    label_temperature: float = 1.0

    @property
    def reads_overlap(self) -> bool:
        return self.log_overlap > 0 or self.blend > 0 or self.length > 0

    @property
    def reads_kl(self) -> bool:
        return self.kl > 0 or self.blend > 0

    @property
    def reads_reverse_kl(self) -> bool:
        return self.reverse_kl > 0


@dataclass(frozen=True)
class LossTerms:
    """Sums over the supervised proposals of one batch; only `numerator` carries a gradient.

    Attributes:
        numerator: scalar, the distance of draft to target plus `Σ w_k confidence·BCE`.
        weight: scalar `Σ w_k`, the denominator.
        ce, tv, confidence: scalars `Σ w_k · term`.
        acceptance: `[P]` sum of overlaps per proposal index.
        correct: `[P]` how often the draft's argmax is the label.
        confidence_error: `[P]` sum of |confidence - overlap|.
        supervised: `[P]` supervised proposals per index.
        expected_length, blocks: summed τ of blocks with a label, and their number.
        overlaps: `[N, P]` of each proposal, 0 where not supervised.
        supervised_slots: `[N, P]` bool.
        confidences: `[N, P]` of each proposal, or None without a confidence head.
    """

    numerator: torch.Tensor
    weight: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor
    correct: torch.Tensor
    confidence_error: torch.Tensor
    supervised: torch.Tensor
    expected_length: torch.Tensor
    blocks: torch.Tensor
    overlaps: torch.Tensor
    supervised_slots: torch.Tensor
    confidences: torch.Tensor | None

    def loss(self, denominator: torch.Tensor | None = None) -> torch.Tensor:
        """The scalar loss; `denominator`: sum of `weight` over all that shares the step."""
        return self.numerator / (self.weight if denominator is None else denominator).clamp(1e-6)


def slot_weights(supervised: torch.Tensor, loss_decay: float) -> torch.Tensor:
    """`w_k` `[N, P]` float32: 1 for the first proposal, falling by e every `loss_decay` slots."""
    slot = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return torch.exp(-slot / loss_decay) * supervised


def assemble(
    states: BlockStates,
    weights: ObjectiveWeights,
    *,
    distance: torch.Tensor,
    ce: torch.Tensor,
    l1: torch.Tensor,
    correct: torch.Tensor,
) -> LossTerms:
    """Terms of a batch from per-proposal numbers, to which the confidence term is added here.

    Args:
        distance: scalar of `divergences.distance`, with its gradient.
        ce, l1: `[N, P]` per proposal.
        correct: `[N, P]` bool, the draft's argmax is the label.
    """
    supervised = states.supervised
    weight = slot_weights(supervised, weights.loss_decay)
    ce, l1 = ce.detach(), l1.detach()
    accepted = (1.0 - 0.5 * l1) * supervised
    numerator = distance
    confidence, error = weight.new_zeros(()), torch.zeros_like(weight)
    confidences = None
    if states.confidence_logits is not None:
        logits = states.confidence_logits.to(accepted.dtype)
        bce = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        confidence = (weight * bce).sum()
        numerator = numerator + weights.confidence * confidence
        confidences = logits.detach().sigmoid()
        error = (confidences - accepted).abs() * supervised
    alive = supervised[:, 0]
    return LossTerms(
        numerator=numerator,
        weight=weight.sum(),
        ce=(weight * ce).sum(),
        tv=(weight * l1).sum(),
        confidence=confidence.detach(),
        acceptance=accepted.sum(0),
        correct=(correct & supervised).sum(0),
        confidence_error=error.sum(0),
        supervised=supervised.sum(0),
        expected_length=(expected_length(accepted) * alive).sum(),
        blocks=alive.sum(),
        overlaps=accepted,
        supervised_slots=supervised,
        confidences=confidences,
    )
