"""Muon (Jordan et al., 2024): momentum, made orthogonal before it is a step."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

ITERATIONS = 5
# of the quintic that takes singular values near one fastest, though never quite there
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; steps have the size of AdamW's (Liu et al., 2025, eq. 4).

    `torch.optim.Muon` multiplies in bfloat16 everywhere, which many CPUs only emulate, and rounds
    matrices that are shared out over processes otherwise than whole ones.

    Args:
        groups: matrices under `params`, each group with its `lr`.
        weight_decay: times the learning rate, taken off the weights.
        dtype: of the products that make orthogonal.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(groups, {"weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every matrix `[m, n]` that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, **{k: group[k] for k in ("lr", "weight_decay", "momentum")})

    def _step(self, matrix: nn.Parameter, lr: float, weight_decay: float, momentum: float) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        direction = matrix.grad.lerp(average, momentum)
        if isinstance(direction, DTensor):
            mesh, placements = direction.device_mesh, direction.placements
            whole = orthogonal(direction.full_tensor(), self.dtype)
            direction = distribute_tensor(whole, mesh, placements)
        else:
            direction = orthogonal(direction, self.dtype)
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(direction, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[m, n]` with its singular values brought near one, by Newton-Schulz in `dtype`."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)
