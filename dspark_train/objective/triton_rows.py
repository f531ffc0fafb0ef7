"""The row mathematics of `rows.py` as Triton kernels: a program per row, no float32 copy of logits.

A row is read twice for its divergences (log-sum-exp, then everything that needs probabilities) and
once more for its gradient, which replaces it. Sums are float32 whatever the logits are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dspark_train.objective.divergences import Divergences
from dspark_train.objective.terms import ObjectiveWeights

BLOCK = 4096
Saved = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TargetLogits:
    """Target logits `[U, V]`, each once; `[3, U]` top logit, Σ exp(logit - top), -entropy."""

    logits: torch.Tensor
    sums: torch.Tensor


@triton.jit
def _sums(row, V, BLOCK: tl.constexpr):  # noqa: N803
    """Top logit, Σ exp(logit - top), and Σ softmax · (logit - top) of a row."""
    top, total, mean = -1e30, 0.0, 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < V, other=-1e30).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # what was summed so far below the old top, now below the new one
        shrink = tl.exp(top - higher)
        mean = (mean + total * (top - higher)) * shrink
        below = x - higher
        e = tl.exp(below)
        total = total * shrink + tl.sum(e, 0)
        mean += tl.sum(e * below, 0)
        top = higher
    return top, total, mean / total


@triton.jit
def _probabilities(row, at, inside, top, total):
    """Probabilities and their logarithms; exp(logit - top) / total keeps more digits than logs."""
    below = tl.load(row + at, mask=inside, other=0.0).to(tl.float32) - top
    return tl.where(inside, tl.exp(below) / total, 0.0), below - tl.log(total)


@triton.jit
def _target_kernel(logits, sums, U, V, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    top, total, mean = _sums(logits + row * V, V, BLOCK)
    sums += row
    tl.store(sums, top)
    tl.store(sums + U, total)
    tl.store(sums + 2 * U, mean - tl.log(total))


@triton.jit
def _divergence_kernel(
    logits, targets, shared, label, target_sums, out, n, U, V, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Rows of `out` [9, n]: CE, hit, L1, overlap, -Σ q log p, reverse KL; Σ p s, top, total."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(shared + row)
    draft, other = logits + row * V, targets + which * V
    top, total, _ = _sums(draft, V, BLOCK)
    target_top, target_total = tl.load(target_sums + which), tl.load(target_sums + U + which)
    l1, overlap, mean_sign, cross, reverse = 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p, log_p = _probabilities(draft, at, at < V, top, total)
        q, log_q = _probabilities(other, at, at < V, target_top, target_total)
        l1 += tl.sum(tl.abs(p - q), 0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        mean_sign += tl.sum(tl.where(p > q, p, 0.0) - tl.where(p < q, p, 0.0), 0)
        cross -= tl.sum(q * log_p, 0)
        reverse += tl.sum(p * (log_p - log_q), 0)
    chosen = tl.load(draft + tl.load(label + row)).to(tl.float32)
    out += row
    tl.store(out, top - chosen + tl.log(total))
    tl.store(out + n, tl.where(chosen >= top, 1.0, 0.0))
    tl.store(out + 2 * n, l1)
    tl.store(out + 3 * n, overlap)
    tl.store(out + 4 * n, cross)
    tl.store(out + 5 * n, reverse)
    tl.store(out + 6 * n, mean_sign)
    tl.store(out + 7 * n, top)
    tl.store(out + 8 * n, total)


@triton.jit
def _gradient_kernel(
    logits, targets, shared, label, target_sums, given, n, U, V, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """`p ⊙ (l1·s + level + reverse·r) - kl·q - ce·1[label]`.

    `given` [7, n]: slopes in this order, then top logit and total of the draft.
    """
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(shared + row)
    draft, other = logits + row * V, targets + which * V
    target_top, target_total = tl.load(target_sums + which), tl.load(target_sums + U + which)
    given += row
    by_l1, level, by_reverse = tl.load(given), tl.load(given + n), tl.load(given + 2 * n)
    by_kl, by_ce = tl.load(given + 3 * n), tl.load(given + 4 * n)
    top, total, chosen = tl.load(given + 5 * n), tl.load(given + 6 * n), tl.load(label + row)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p, log_p = _probabilities(draft, at, at < V, top, total)
        q, log_q = _probabilities(other, at, at < V, target_top, target_total)
        sign = tl.where(p > q, 1.0, 0.0) - tl.where(p < q, 1.0, 0.0)
        gradient = p * (by_l1 * sign + level + by_reverse * (log_p - log_q)) - by_kl * q
        gradient -= tl.where(at == chosen, by_ce, 0.0)
        tl.store(draft + at, gradient.to(logits.dtype.element_ty), mask=at < V)


class TritonRows:
    """`PlainRows` by kernels; the interface is the same."""

    def __init__(self, weights: ObjectiveWeights, wide: torch.dtype) -> None:
        """
        Raises:
            ValueError: for sums in anything but float32.
        """
        if wide != torch.float32:
            raise ValueError(f"the Triton rows sum in float32, not {wide}: take the plain ones")
        self.weights = weights

    def target_bytes(self) -> int:
        return 0

    def rows_at_once(self, device: torch.device, vocab_size: int) -> int | None:
        return None

    def targets(self, logits: torch.Tensor) -> TargetLogits:
        logits, (U, V) = logits.contiguous(), logits.shape
        sums = torch.empty(3, U, device=logits.device)
        _target_kernel[(U,)](logits, sums, U, V, BLOCK)
        return TargetLogits(logits, sums)

    def divergences(
        self, logits: torch.Tensor, targets: TargetLogits, shared: torch.Tensor, label: torch.Tensor
    ) -> tuple[Divergences, torch.Tensor, Saved]:
        (n, V), U = logits.shape, len(targets.logits)
        out = torch.empty(9, n, device=logits.device)
        rows = (targets.logits, shared, label, targets.sums)
        _divergence_kernel[(n,)](logits, *rows, out, n, U, V, BLOCK)
        ce, hit, l1, overlap, cross, reverse, *kept = out.unbind()
        reads = self.weights
        found = Divergences(
            ce,
            l1,
            overlap if reads.reads_overlap else None,
            targets.sums[2, shared] + cross if reads.reads_kl else None,
            reverse if reads.reads_reverse_kl else None,
        )
        return found, hit.bool(), (*rows, reverse, *kept)

    def gradient_(self, logits: torch.Tensor, saved: Saved, slopes: Divergences) -> None:
        *rows, reverse, mean_sign, top, total = saved
        (n, V), U, none = logits.shape, len(rows[0]), torch.zeros_like(top)
        by = slopes.map(lambda slope: slope.float())
        by_l1 = by.l1 if by.overlap is None else by.l1 - 0.5 * by.overlap
        by_kl = none if by.kl is None else by.kl
        by_reverse = none if by.reverse_kl is None else by.reverse_kl
        level = by.ce + by_kl - by_l1 * mean_sign - by_reverse * reverse
        given = torch.stack((by_l1, level, by_reverse, by_kl, by.ce, top, total))
        _gradient_kernel[(n,)](logits, *rows, given, n, U, V, BLOCK)
