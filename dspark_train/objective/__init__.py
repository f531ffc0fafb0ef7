"""What a drafter is trained for."""

from dspark_train.objective.acceptance import expected_length, overlap, survival
from dspark_train.objective.loss import LossTerms, ObjectiveWeights, drafter_loss

__all__ = [
    "LossTerms",
    "ObjectiveWeights",
    "drafter_loss",
    "expected_length",
    "overlap",
    "survival",
]
