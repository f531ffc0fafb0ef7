"""The confidence head fitted on prefixes that the drafter sampled itself.

Training sees the target's own tokens before every slot; decoding sees drafts. Decoding traces have
the right prefixes and exact labels (the overlap of draft and target there), and since the head is
one linear layer, fitting it is a convex problem.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

# strength of the pull towards the weights as they were; infinite keeps them
PULLS = (1e-4, 1e-3, 1e-2, 1e-1, float("inf"))


@dataclass(frozen=True)
class Refit:
    """`weight` `[W]` and `bias` of the head; binary cross-entropies on conversations left out of
    the fit, before and after; the pull that was best there."""

    weight: torch.Tensor
    bias: torch.Tensor
    before: float
    after: float
    pull: float


def refit(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    conversation: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> Refit:
    """Fit `σ(w·x + b)` to soft labels.

    Args:
        inputs: `[N, W]` what the head read.
        labels: `[N]` in [0, 1].
        conversation: `[N]`; every fourth is left out to choose how far to go. The weights as they
            were are among the choices, so the result is not worse there.
        weight, bias: `[W]` and `[]`, as they were.

    Raises:
        ValueError: fewer than two conversations.
    """
    names = conversation.unique()
    if len(names) < 2:
        raise ValueError(
            f"{len(names)} conversations with verified drafts: expected at least 2, one of them to "
            "choose by; decode more prompts"
        )
    held = torch.isin(conversation, names[::4])
    x, y = inputs.double(), labels.double()
    # columns of one scale, so that the pull means the same for each
    scale = x[~held].std(0).clamp(min=1e-6) if int((~held).sum()) > 1 else torch.ones(x.shape[1])
    start = torch.cat((weight.double().flatten() * scale, bias.double().reshape(1)))
    x = torch.cat((x / scale, x.new_ones(len(x), 1)), dim=1)

    def loss(theta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(x[rows] @ theta, y[rows])

    fitted = {pull: _fit(lambda theta: loss(theta, ~held), start, pull) for pull in PULLS}
    pull = min(PULLS, key=lambda p: float(loss(fitted[p], held)))
    best = fitted[pull]
    return Refit(
        weight=(best[:-1] / scale).to(weight.dtype),
        bias=best[-1].to(bias.dtype),
        before=float(loss(start, held)),
        after=float(loss(best, held)),
        pull=pull,
    )


def _fit(loss: object, start: torch.Tensor, pull: float) -> torch.Tensor:
    if pull == float("inf"):
        return start
    theta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = loss(theta) + pull * (theta - start).square().sum()
        value.backward()
        return value

    optimiser.step(closure)
    return theta.detach()
