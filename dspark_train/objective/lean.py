"""The lean twin of the reference loss: same numbers and gradients, a few blocks at a time.

An objective needs each `[V]` row of logits once: to know its softmax, how far it is from the
target's, and how that changes with the logits. So forward and backward are one sweep over chunks of
whole blocks; a chunk's logits become their own gradient in place and are gone before the next
chunk's exist. Objectives that couple the proposals of a block cost no second sweep, because a chunk
never cuts a block. Blocks overlap, so several proposals share a target row: blocks are swept in the
order of their first one, and a chunk computes each target distribution once.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dspark_train.objective.divergences import slopes
from dspark_train.objective.rows import PlainRows, split
from dspark_train.objective.states import BlockStates
from dspark_train.objective.terms import LossTerms, ObjectiveWeights, assemble
from dspark_train.target.head import TargetHead


def lean_loss(
    states: BlockStates,
    head: TargetHead,
    w2: torch.Tensor | None,
    weights: ObjectiveWeights,
    *,
    memory_mb: float = 128.0,
    kernel: str = "plain",
) -> LossTerms:
    """`reference_loss` without its memory; see there.

    Args:
        memory_mb: budget for what a chunk holds, draft and target together; one block is the
            least that a chunk can be.
        kernel: of the row mathematics, "plain" or "triton".

    Raises:
        ValueError: the Triton kernel was asked for where it cannot be had.
    """
    blocks = states.supervised[:, 0].nonzero().squeeze(-1)
    blocks = blocks[states.target_rows[blocks, 0].argsort(stable=True)]
    supervised = states.supervised[blocks]

    def pick(values: torch.Tensor) -> torch.Tensor:
        return values[blocks][supervised]

    sweep = _Blocks(
        supervised=supervised,
        edges=[0, *supervised.sum(-1).cumsum(0).tolist()],
        target_hidden=states.target_hidden,
        target=pick(states.target_rows),
        label=pick(states.labels),
        head=head,
        weights=weights,
        kernel=row_kernel(kernel),
        budget=memory_mb * 2**20,
        needs_gradient=torch.is_grad_enabled(),
    )
    total, *numbers = _Sweep.apply(
        pick(states.hidden),
        None if states.latents is None else pick(states.latents),
        w2 if states.latents is not None else None,
        sweep,
    )

    def spread(values: torch.Tensor) -> torch.Tensor:
        full = values.new_zeros(states.supervised.shape)
        full[blocks] = values.new_zeros(supervised.shape).masked_scatter(supervised, values)
        return full

    ce, l1, correct = map(spread, numbers)
    return assemble(states, weights, distance=total, ce=ce, l1=l1, correct=correct)


@dataclass(frozen=True)
class _Blocks:
    """What a sweep reads: n supervised proposals of N blocks, block after block."""

    supervised: torch.Tensor  # [N, P]
    edges: list[int]  # N + 1: block i holds the rows from edges[i] to edges[i + 1]
    target_hidden: torch.Tensor  # [U, D]
    target: torch.Tensor  # [n] row of target_hidden
    label: torch.Tensor  # [n]
    head: TargetHead
    weights: ObjectiveWeights
    kernel: type
    budget: float  # bytes
    needs_gradient: bool

    def rows(self, blocks: slice) -> slice:
        return slice(self.edges[blocks.start], self.edges[blocks.stop])


def row_kernel(name: str) -> type:
    """`PlainRows`, or the class that stands in for it.

    Raises:
        ValueError: triton is not installed.
    """
    if name == "plain":
        return PlainRows
    try:
        from dspark_train.objective.triton_rows import TritonRows
    except ImportError as error:
        raise ValueError(
            f"loss kernel {name} needs the package triton, which cannot be imported ({error}): "
            "install dspark_train[triton], or take the plain one"
        ) from error
    return TritonRows


class _Sweep(torch.autograd.Function):
    """The objective's scalar, with per-row CE, L1 and hits; gradients are made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        latents: torch.Tensor | None,
        w2: torch.Tensor | None,
        work: _Blocks,
    ) -> tuple[torch.Tensor, ...]:
        head, (num_blocks, P) = work.head, work.supervised.shape
        projection, V = head.projection.weight, head.vocab_size
        # matrix products run in the head's dtype, or in that of autocast, all else wide
        kind, low = hidden.device.type, projection.dtype
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
        wide = torch.promote_types(low, torch.float32)
        kernel = work.kernel(work.weights, wide)
        n, capped = len(hidden), head.soft_cap is not None
        low_w2 = None if w2 is None else w2.to(low)
        grads: list[torch.Tensor | None] = [
            torch.zeros_like(leaf, dtype=wide) if work.needs_gradient and needed else None
            for leaf, needed in zip((hidden, latents, w2), ctx.needs_input_grad[:3], strict=True)
        ]
        total = hidden.new_zeros((), dtype=wide)
        ce, l1 = hidden.new_zeros(n, dtype=wide), hidden.new_zeros(n, dtype=wide)
        correct = torch.zeros(n, dtype=torch.bool, device=hidden.device)

        # draft and target logits, the target's distribution, and uncapped logits beside capped ones
        row_bytes = V * (low.itemsize * (3 if capped else 2) + kernel.target_bytes())
        most = max(1, int(work.budget / (row_bytes * P)))
        # chunks of one size: each reads the whole head, which a small last one would not pay for
        per_chunk = -(-num_blocks // max(1, -(-num_blocks // most)))
        at_once = kernel.rows_at_once(hidden.device, V)
        per_part = None if at_once is None else max(1, at_once // P)
        for chunk in split(0, num_blocks, per_chunk):
            rows = work.rows(chunk)
            used, shared = work.target[rows].unique(return_inverse=True)
            predicted = head.logits(work.target_hidden[used].to(low))
            targets = kernel.targets(predicted.div_(work.weights.label_temperature))
            del predicted
            unary = head.logits(hidden[rows].to(low))
            logits = unary
            if latents is not None:
                z = latents[rows].to(low)
                logits = torch.addmm(unary, z, low_w2.T, out=None if capped else unary)
            elif capped:
                logits = unary.clone()
            for part in split(chunk.start, chunk.stop, per_part):
                out = work.rows(part)
                here = slice(out.start - rows.start, out.stop - rows.start)
                found, correct[out], saved = kernel.divergences(
                    logits[here], targets, shared[here], work.label[out]
                )
                ce[out], l1[out] = found.ce, found.l1
                value, by = slopes(found, work.supervised[part], work.weights)
                total += value
                if work.needs_gradient:
                    kernel.gradient_(logits[here], saved, by)
                    if capped:
                        squashed = unary[here].to(wide) / head.soft_cap
                        unary[here] = logits[here] * (1 - squashed.square())
            if grads[0] is not None:
                grads[0][rows] = (unary @ projection).to(wide).mul_(head.scale)
            if grads[1] is not None:
                grads[1][rows] = (logits @ low_w2).to(wide)
            if grads[2] is not None:
                grads[2] += logits.T @ z

        ctx.mark_non_differentiable(ce, l1, correct)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if given is None else given.dtype for given in (hidden, latents, w2)]
        return total, ce, l1, correct

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = [
            None if made is None else (made * grad).to(dtype)
            for made, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None)
