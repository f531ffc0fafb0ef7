"""AdamW with linear warm-up and cosine decay to zero (DSpark, training details)."""

import math
from collections.abc import Iterable

import torch
from torch import nn


def cosine_schedule(step: int, *, warmup: int, total: int) -> float:
    """Factor on the learning rate at optimiser step `step` of `total`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    warmup: float,
    total: int,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The optimiser and its schedule over `total` steps, of which a share `warmup` warms up."""
    optimiser = torch.optim.AdamW(
        [p for p in parameters if p.requires_grad],
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        fused=True,
    )
    # a fused step could undo a loss scale, for which Lightning refuses to clip; bf16 has none
    optimiser._step_supports_amp_scaling = False
    steps = max(1, round(warmup * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: cosine_schedule(step, warmup=steps, total=total)
    )
    return optimiser, schedule
