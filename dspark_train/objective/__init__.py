"""What a drafter is trained for."""

from dspark_train.objective.acceptance import expected_length, overlap, survival
from dspark_train.objective.lean import lean_loss
from dspark_train.objective.loss import reference_loss
from dspark_train.objective.states import BlockStates
from dspark_train.objective.terms import LossTerms, ObjectiveWeights

__all__ = [
    "BlockStates",
    "LossTerms",
    "ObjectiveWeights",
    "expected_length",
    "lean_loss",
    "overlap",
    "reference_loss",
    "survival",
]
