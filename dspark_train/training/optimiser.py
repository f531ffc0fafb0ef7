"""AdamW or Muon, linear warm-up and cosine decay to zero (DSpark, training details)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dspark_train.config import TrainConfig
from dspark_train.training.muon import Muon

HEADS = ("markov_head", "confidence_head")


def is_head(name: str) -> bool:
    """Whether a drafter's parameter belongs to its sequential or confidence head."""
    return name.startswith(HEADS)


def cosine_schedule(step: int, *, warmup: int, total: int) -> float:
    """Factor on the learning rate at optimiser step `step` of `total`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def fused_adamw(
    groups: list[dict[str, Any]], betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW in one kernel, which takes a seventh of the time on a CPU."""
    optimiser = torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay, fused=True)
    # it could undo a loss scale by itself; gradients are unscaled before they are clipped
    optimiser._step_supports_amp_scaling = False
    return optimiser


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for all else, as one optimiser.

    Muon's steps are scaled to the size of AdamW's, so both take the same learning rates.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        betas: tuple[float, float],
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        self._muon = Muon(matrices, weight_decay=weight_decay, dtype=dtype)
        self._adamw = fused_adamw(others, betas, weight_decay)
        both = (self._muon, self._adamw)
        super().__init__([group for part in both for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        split = len(self._muon.param_groups)
        for part, groups in (
            (self._muon, self.param_groups[:split]),
            (self._adamw, self.param_groups[split:]),
        ):
            # loading a state replaces both
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss


def make_optimiser(
    parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainConfig, lr: float, total: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimiser and its schedule over `total` steps, of which a share `warmup` warms up.

    Args:
        parameters: named as in the drafter; those without a gradient are left out.
        settings: `optimiser`, `precision` (under bf16 Muon multiplies in bfloat16), `betas`,
            `weight_decay`, `warmup`, `lr_heads` and `lr_parts`.
        lr: of what has no learning rate of its own.
        total: optimiser steps.

    Raises:
        ValueError: `lr_parts` names something that is not there.
    """
    everything = list(parameters)
    trained = [(name, p) for name, p in everything if p.requires_grad]
    rates = learning_rates([name for name, _ in everything], settings, lr)
    betas = (settings.betas[0], settings.betas[1])

    def groups(chosen: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        found: dict[float, list[nn.Parameter]] = {}
        for name, parameter in chosen:
            found.setdefault(rates[name], []).append(parameter)
        return [{"params": parts, "lr": rate} for rate, parts in found.items()]

    def by_muon(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() == 2 and not is_head(name)

    optimiser: torch.optim.Optimizer
    matrices = [item for item in trained if settings.optimiser == "muon" and by_muon(*item)]
    if matrices:
        others = [item for item in trained if not by_muon(*item)]
        dtype = torch.bfloat16 if settings.precision.startswith("bf16") else torch.float32
        optimiser = MuonAdamW(groups(matrices), groups(others), betas, settings.weight_decay, dtype)
    else:  # heads alone have nothing for Muon
        optimiser = fused_adamw(groups(trained), betas, settings.weight_decay)
    warmup = max(1, round(settings.warmup * total))
    schedule = LambdaLR(optimiser, lambda step: cosine_schedule(step, warmup=warmup, total=total))
    return optimiser, schedule


def learning_rates(names: list[str], settings: TrainConfig, lr: float) -> dict[str, float]:
    """Learning rate by parameter name: that of the longest matching part, of the heads, or `lr`.

    Raises:
        ValueError: a part that no parameter belongs to.
    """
    parts: Mapping[str, float] = settings.lr_parts

    def belongs(name: str, part: str) -> bool:
        return f"{name}.".startswith(f"{part}.")

    for part in parts:
        if not any(belongs(name, part) for name in names):
            known = sorted({name.split(".")[0] for name in names})
            raise ValueError(
                f"train.lr_parts names {part!r}, which this drafter does not have: expected the "
                f"beginning of a parameter's name, like {known}"
            )

    def rate(name: str) -> float:
        matching = [part for part in parts if belongs(name, part)]
        if matching:
            return parts[max(matching, key=len)]
        return settings.lr_heads if is_head(name) and settings.lr_heads is not None else lr

    return {name: rate(name) for name in names}
