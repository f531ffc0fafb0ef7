"""How far a draft is from the target, and the objectives that are made of it.

With p = draft, q = target, per proposal: `CE = -log p[label]`, `L1 = Σ|p - q|`,
`overlap = Σ min(p, q)`, `KL = Σ q log(q/p)`, `reverse KL = Σ p log(p/q)`. Every objective is a
function of these five numbers, written once, in `distance`. The reference loss lets autograd go
through all of it; the lean one asks `slopes` how much each number matters, and knows by itself how
the numbers change with the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch.nn import functional as F

from dspark_train.objective.acceptance import survival
from dspark_train.objective.terms import ObjectiveWeights, slot_weights


@dataclass(frozen=True)
class Divergences:
    """The numbers of proposals, all of one shape; None is what no objective with a weight reads."""

    ce: torch.Tensor
    l1: torch.Tensor
    overlap: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    reverse_kl: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Divergences":
        """The same with `function` applied to every number that is there."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return Divergences(**{k: v if v is None else function(v) for k, v in found.items()})


def measure(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    weights: ObjectiveWeights,
) -> Divergences:
    """The definitions. Logits `[N, P, V]`, labels `[N, P]`; numbers `[N, P]`."""
    log_draft, target = draft_logits.log_softmax(-1), target_logits.softmax(-1)
    draft = log_draft.exp()
    overlap = kl = reverse_kl = None
    if weights.reads_overlap:
        overlap = torch.minimum(draft, target).sum(-1)
    if weights.reads_kl or weights.reads_reverse_kl:
        log_target = target_logits.log_softmax(-1)
        kl = (target * (log_target - log_draft)).sum(-1)
        reverse_kl = (draft * (log_draft - log_target)).sum(-1)
    return Divergences(
        ce=F.nll_loss(log_draft.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels),
        l1=(draft - target).abs().sum(-1),
        overlap=overlap,
        kl=kl if weights.reads_kl else None,
        reverse_kl=reverse_kl if weights.reads_reverse_kl else None,
    )


def distance(
    found: Divergences, supervised: torch.Tensor, weights: ObjectiveWeights
) -> torch.Tensor:
    """The scalar that training makes small, confidence apart, of numbers `[N, P]`.

    Sum over supervised proposals, with `w_k` from `slot_weights`, of

        w_k (ce·CE + tv·L1 + kl·KL + reverse_kl·RKL - log_overlap·log overlap
             + blend·(λ KL + (1 - λ)(1 - overlap))),   λ = exp(-3 overlap), without gradient,

    minus `length · Σ_k Π_{i≤k} overlap_i` of every block. That last one couples the proposals of a
    block, and needs no `w_k`: survival falls by itself.
    """
    rows = weights.ce * found.ce + weights.tv * found.l1
    if weights.kl:
        rows = rows + weights.kl * found.kl
    if weights.reverse_kl:
        rows = rows + weights.reverse_kl * found.reverse_kl
    if weights.log_overlap:
        # a draft that shares nothing representable with the target has no slope, but a value
        least = torch.finfo(found.overlap.dtype).tiny
        rows = rows - weights.log_overlap * found.overlap.clamp(least).log()
    if weights.blend:
        kl_share = torch.exp(-3.0 * found.overlap.detach())
        mixed = kl_share * found.kl + (1.0 - kl_share) * (1.0 - found.overlap)
        rows = rows + weights.blend * mixed
    total = (slot_weights(supervised, weights.loss_decay) * rows).sum()
    if weights.length:
        total = total - weights.length * survival(found.overlap * supervised).sum()
    return total


def slopes(
    found: Divergences, supervised: torch.Tensor, weights: ObjectiveWeights
) -> tuple[torch.Tensor, Divergences]:
    """`distance` of whole blocks, and its derivative by each number.

    Args:
        found: numbers `[n]` of the supervised proposals, block by block.
        supervised: `[N, P]` bool, n of them true.
    """
    leaves = found.map(lambda number: number.detach().requires_grad_())
    with torch.enable_grad():
        full = leaves.map(
            lambda number: number.new_zeros(supervised.shape).masked_scatter(supervised, number)
        )
        total = distance(full, supervised, weights)
        inputs = [getattr(leaves, f.name) for f in fields(leaves)]
        given = [number for number in inputs if number is not None]
        found_slopes = iter(torch.autograd.grad(total, given, materialize_grads=True))
    return total.detach(), leaves.map(lambda _: next(found_slopes))
