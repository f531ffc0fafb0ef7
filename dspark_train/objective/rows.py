"""Rows of logits to their divergences, and to the gradient of an objective made of those.

With p = draft, q = target, s = sign(p - q), per row by the draft's logits:

    ∂CE = p - 1[label]        ∂L1 = p ⊙ (s - Σ p s)        ∂overlap = -½ ∂L1
    ∂KL = p - q               ∂(reverse KL) = p ⊙ (r - Σ p r),   r = log p - log q
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dspark_train.objective.divergences import Divergences
from dspark_train.objective.terms import ObjectiveWeights

# temporaries of this size stay in a CPU's cache; a GPU takes everything at once
CACHE_BYTES = 4 * 2**20

# what `divergences` keeps for `gradient_`
Saved = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class TargetRows:
    """Target distributions, each once: `probs` `[U, V]`, and what some objectives need of them."""

    probs: torch.Tensor
    logs: torch.Tensor | None  # [U, V]
    negative_entropy: torch.Tensor | None  # [U]


class PlainRows:
    """The row mathematics in PyTorch, for every device."""

    def __init__(self, weights: ObjectiveWeights, wide: torch.dtype) -> None:
        """Softmax and sums run in `wide`."""
        self.weights, self.wide = weights, wide

    def target_bytes(self) -> int:
        """Bytes that `targets` keeps per entry of a row."""
        return self.wide.itemsize * (2 if self.weights.reads_reverse_kl else 1)

    def rows_at_once(self, device: torch.device, vocab_size: int) -> int | None:
        """How many rows `divergences` should get at a time; None: as many as there are."""
        if device.type != "cpu":
            return None
        return max(1, CACHE_BYTES // (self.wide.itemsize * vocab_size))

    def targets(self, logits: torch.Tensor) -> TargetRows:
        """Distributions of target logits `[U, V]`."""
        probs = logits.new_empty(logits.shape, dtype=self.wide)
        logs = torch.empty_like(probs) if self.weights.reads_reverse_kl else None
        entropy = probs.new_empty(len(probs)) if self.weights.reads_kl else None
        for part in split(0, len(logits), self.rows_at_once(logits.device, logits.shape[1])):
            wide = logits[part].to(self.wide)
            torch.softmax(wide, -1, out=probs[part])
            if entropy is not None:
                entropy[part] = torch.special.entr(probs[part]).sum(-1)
            if logs is not None:
                logs[part] = wide.log_softmax(-1)
        return TargetRows(probs, logs, None if entropy is None else -entropy)

    def divergences(
        self, logits: torch.Tensor, targets: TargetRows, shared: torch.Tensor, label: torch.Tensor
    ) -> tuple[Divergences, torch.Tensor, Saved]:
        """Numbers `[c]` of draft logits `[c, V]`, whether the label is on top, what is kept.

        Args:
            shared: `[c]` row of `targets`.
            label: `[c]`.
        """
        x, label = logits.to(self.wide), label[:, None]
        top, label_logit = x.amax(-1, keepdim=True), x.gather(1, label)
        p, q = x.softmax(-1), targets.probs[shared]
        # log-sum-exp by way of the largest entry, whose probability cannot underflow
        log_sum = top - p.amax(-1, keepdim=True).log()
        difference = p - q
        l1 = difference.abs().sum(-1)
        sign = difference.sign_()
        overlap = kl = reverse_kl = log_ratio = None
        if self.weights.reads_overlap:
            overlap = torch.minimum(p, q).sum(-1)
        if self.weights.reads_kl:
            cross_entropy = log_sum.squeeze(1) - torch.linalg.vecdot(q, x)
            kl = targets.negative_entropy[shared] + cross_entropy
        if self.weights.reads_reverse_kl:
            log_ratio = (x - log_sum).sub_(targets.logs[shared])
            reverse_kl = torch.linalg.vecdot(p, log_ratio)
        found = Divergences((log_sum - label_logit).squeeze(1), l1, overlap, kl, reverse_kl)
        return found, (label_logit >= top).squeeze(1), (p, q, sign, log_ratio, label)

    def gradient_(self, logits: torch.Tensor, saved: Saved, slopes: Divergences) -> None:
        """Replace draft logits by the objective's gradient, from slopes `[c]`; consumes `saved`."""
        p, q, sign, log_ratio, label = saved
        by = slopes.map(lambda slope: slope[:, None].to(p.dtype))
        by_l1 = by.l1 if by.overlap is None else by.l1 - 0.5 * by.overlap
        level = by.ce - by_l1 * torch.linalg.vecdot(p, sign)[:, None]
        gradient = sign.mul_(by_l1)
        if log_ratio is not None:
            level -= by.reverse_kl * torch.linalg.vecdot(p, log_ratio)[:, None]
            gradient.addcmul_(log_ratio, by.reverse_kl)
        if by.kl is not None:
            level += by.kl
        gradient.add_(level).mul_(p)
        if by.kl is not None:
            gradient.addcmul_(q, -by.kl)
        logits.copy_(gradient.scatter_add_(1, label, -by.ce))


def split(start: int, stop: int, size: int | None) -> Iterator[slice]:
    """Slices of at most `size` (None: one) that cover `start` to `stop`."""
    size = size or max(stop - start, 1)
    for begin in range(start, stop, size):
        yield slice(begin, min(stop, begin + size))
