"""The lean twin of the reference loss: same numbers and gradients, a few rows of logits at a time.

The loss needs each `[V]` row of logits once: to know its softmax, its distance to the target's, and
how that distance changes with the logits. So forward and backward are one sweep over chunks of
rows; a chunk's logits become their own gradient in place and are gone before the next chunk's
exist. Blocks overlap, so several proposals share a target row: rows are swept in the order of their
target, whose distribution is computed once per chunk.

With p = draft, q = target, s = sign(p - q), per row:
`∂CE/∂logits = p - 1[label]` and `∂‖p - q‖₁/∂logits = p ⊙ (s - Σ p s)`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from dspark_train.objective.states import BlockStates
from dspark_train.objective.terms import LossTerms, ObjectiveWeights, assemble, slot_weights
from dspark_train.target.head import TargetHead

# float32 temporaries of this size stay in a CPU's cache; a GPU takes the whole chunk at once
CACHE_BYTES = 4 * 2**20


def lean_loss(
    states: BlockStates,
    head: TargetHead,
    w2: torch.Tensor | None,
    weights: ObjectiveWeights,
    *,
    memory_mb: float = 128.0,
) -> LossTerms:
    """`reference_loss` without its memory; see there.

    Args:
        memory_mb: budget for the logits of one chunk, draft and target together.
    """
    chosen = states.supervised.flatten().nonzero().squeeze(-1)
    # rows that share a target lie side by side
    chosen = chosen[states.target_rows.flatten()[chosen].argsort(stable=True)]

    def pick(values: torch.Tensor) -> torch.Tensor:
        return values.flatten(0, 1)[chosen]

    row_bytes = head.vocab_size * head.projection.weight.element_size()
    rows = _Rows(
        target_hidden=states.target_hidden,
        target=pick(states.target_rows),
        label=pick(states.labels),
        weight=pick(slot_weights(states.supervised, weights.loss_decay)),
        head=head,
        weights=weights,
        chunk=max(1, int(memory_mb * 2**20 / (2 * row_bytes))),
    )
    distance, *numbers = _Sweep.apply(
        pick(states.hidden),
        None if states.latents is None else pick(states.latents),
        w2 if states.latents is not None else None,
        rows,
    )

    def scatter(values: torch.Tensor) -> torch.Tensor:
        full = values.new_zeros(states.supervised.numel())
        return full.index_copy(0, chosen, values).view_as(states.supervised)

    ce, l1, correct = map(scatter, numbers)
    return assemble(states, weights, distance=distance, ce=ce, l1=l1, correct=correct)


@dataclass(frozen=True)
class _Rows:
    """What a sweep over n supervised proposals reads, sorted by their target row."""

    target_hidden: torch.Tensor  # [U, D]
    target: torch.Tensor  # [n] row of target_hidden
    label: torch.Tensor  # [n]
    weight: torch.Tensor  # [n]
    head: TargetHead
    weights: ObjectiveWeights
    chunk: int


class _Sweep(torch.autograd.Function):
    """Σ w (ce·CE + tv·L1), with per-row CE, L1 and hits; gradients are made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        latents: torch.Tensor | None,
        w2: torch.Tensor | None,
        rows: _Rows,
    ) -> tuple[torch.Tensor, ...]:
        projection, head = rows.head.projection.weight, rows.head
        low = projection.dtype  # matrix products run in the head's dtype, all else wide
        wide = torch.promote_types(low, torch.float32)
        n = len(hidden)
        low_w2 = None if w2 is None else w2.to(low)
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        grad_latents = None if latents is None else torch.zeros_like(latents, dtype=wide)
        grad_w2 = None if w2 is None else torch.zeros_like(w2, dtype=wide)
        ce, l1 = hidden.new_zeros(n, dtype=wide), hidden.new_zeros(n, dtype=wide)
        correct = torch.zeros(n, dtype=torch.bool, device=hidden.device)
        inner = rows.chunk
        if hidden.device.type == "cpu":
            inner = max(1, CACHE_BYTES // (4 * head.vocab_size))

        for start in range(0, n, rows.chunk):
            chunk = slice(start, min(n, start + rows.chunk))
            used, shared = rows.target[chunk].unique_consecutive(return_inverse=True)
            target = head.logits(rows.target_hidden[used].to(low))
            unary = head.logits(hidden[chunk].to(low))
            bias = None
            if latents is not None:
                z = latents[chunk].to(low)
                bias = F.linear(z, low_w2)
            for offset in range(0, len(unary), inner):
                part = slice(offset, min(len(unary), offset + inner))
                out = slice(start + part.start, start + part.stop)
                logits = unary[part].to(wide)
                if bias is not None:
                    logits = logits + bias[part]
                gradient, ce[out], l1[out], correct[out] = _row_gradients(
                    logits, target[shared[part]].to(wide), rows, out
                )
                if bias is not None:
                    bias[part] = gradient  # now the gradient of the bias …
                if head.soft_cap is not None:
                    gradient *= 1 - (unary[part].to(wide) / head.soft_cap).square()
                unary[part] = gradient.mul_(head.scale)  # … and of the raw logits
            if bias is not None:
                grad_latents[chunk] = (bias @ low_w2).to(wide)
                grad_w2 += (bias.T @ z).to(wide)
            if grad_hidden is not None:
                grad_hidden[chunk] = (unary @ projection).to(wide)

        ctx.mark_non_differentiable(ce, l1, correct)
        ctx.save_for_backward(grad_hidden, grad_latents, grad_w2)
        ctx.dtypes = [None if given is None else given.dtype for given in (hidden, latents, w2)]
        distance = (rows.weight.to(wide) * (rows.weights.ce * ce + rows.weights.tv * l1)).sum()
        return distance, ce, l1, correct

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = [
            None if made is None else (made * grad).to(dtype)
            for made, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None)


def _row_gradients(
    logits: torch.Tensor, target_logits: torch.Tensor, rows: _Rows, at: slice
) -> tuple[torch.Tensor, ...]:
    """Gradient `[c, V]` of `w (ce·CE + tv·L1)` by the logits, then CE, L1 and hits `[c]`."""
    label, weight = rows.label[at, None], rows.weight[at, None].to(logits.dtype)
    top, label_logit = logits.amax(-1, keepdim=True), logits.gather(1, label)
    draft = logits.softmax(-1)
    # log-sum-exp by way of the largest entry, whose probability cannot underflow
    ce = top - draft.amax(-1, keepdim=True).log() - label_logit
    difference = draft - target_logits.softmax(-1)
    l1 = difference.abs().sum(-1)
    sign = difference.sign_()
    mean_sign = torch.linalg.vecdot(draft, sign)[:, None]
    scale = weight * rows.weights.tv
    gradient = sign.mul_(scale).add_(weight * rows.weights.ce - scale * mean_sign).mul_(draft)
    gradient.scatter_add_(1, label, -weight * rows.weights.ce)
    return gradient, ce.squeeze(1), l1, (label_logit >= top).squeeze(1)
