"""What must stop a training: numbers that are not finite, nothing to learn, weights at rest."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dspark_train.data.batch import Batch
from dspark_train.training.sums import Sums

Fingerprints = dict[str, list[float]]


class Checks:
    """Looks at every step; `taught` counts the blocks with a supervised label so far."""

    def __init__(self) -> None:
        self.taught = 0.0
        self.blamed: str | None = None

    def blame(self, batch: Batch, drafter: nn.Module) -> None:
        """Find out what made the loss of a batch something else than a number."""
        for row in range(len(batch.features)):
            if not batch.features[row].isfinite().all():
                ids = batch.input_ids[row, :8].tolist()
                self.blamed = (
                    f"the features of row {row} of its batch (tokens {ids} …) have NaN or Inf: "
                    "capture again with force=[capture]"
                )
                return
        if not batch.last_hidden.isfinite().all():
            self.blamed = "the target's last hidden states have NaN or Inf: capture again"
            return
        for name, parameter in drafter.named_parameters():
            if not parameter.isfinite().all():
                self.blamed = f"parameter {name} has NaN or Inf: lower train.lr"
                return

    def require_finite(self, sums: Sums, step: int) -> None:
        """Stop at a loss that is not finite, on all processes alike.

        Raises:
            ValueError: naming the step and, on the process that met it, the row or the parameter.
        """
        loss = sums.numerator
        if loss - loss != 0:  # NaN and Inf
            reason = self.blamed or (
                "features and weights are finite, what is computed of them is not; lower train.lr"
            )
            raise ValueError(f"the loss of step {step} is {loss}: {reason}")

    def count(self, sums: Sums) -> None:
        self.taught += sums.blocks

    def require_motion(self, drafter: nn.Module, before: Fingerprints, steps: int) -> None:
        """Stop where steps have been made that changed nothing.

        Raises:
            ValueError: no step had a supervised token, or naming the parameters at rest.
        """
        if not self.taught:
            raise ValueError(
                f"none of {steps} steps had a block with a supervised token: the loss mask of the "
                "documents is empty where anchors may lie; look at the rollouts"
            )
        still = [name for name, found in fingerprints(drafter).items() if found == before[name]]
        if still:
            raise ValueError(
                f"{len(still)} parameters have not moved in {steps} steps, {still[0]} among them: "
                "no gradient reaches them, or train.lr is too small for their precision"
            )


def fingerprints(drafter: nn.Module) -> Fingerprints:
    """Two sums of every parameter that is trained; they change when it does."""
    found = {}
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad:
                wide = parameter.detach().double()
                pair = [wide.sum(), wide.square().sum()]
                found[name] = [
                    (value.full_tensor() if isinstance(value, DTensor) else value).item()
                    for value in pair
                ]
    return found
