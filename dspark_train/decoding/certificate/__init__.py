"""Proofs that decoding is lossless, on a user's own models and settings."""

from dspark_train.decoding.certificate.faults import FAULTS
from dspark_train.decoding.certificate.round_law import RoundLaw, round_law
from dspark_train.decoding.certificate.two_samples import Comparison, compare, detectable

__all__ = ["FAULTS", "Comparison", "RoundLaw", "compare", "detectable", "round_law"]
