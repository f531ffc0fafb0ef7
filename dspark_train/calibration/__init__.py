"""Confidence that means something: how far it is off, and what mends it."""

from dspark_train.calibration.ece import expected_calibration_error
from dspark_train.calibration.scaling import Scaling
from dspark_train.calibration.sts import fit_temperatures, prefix_confidence

__all__ = ["Scaling", "expected_calibration_error", "fit_temperatures", "prefix_confidence"]
