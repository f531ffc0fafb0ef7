"""The frozen target model: forward with taps, embedding, head, layer-index rule."""

from dspark_train.target.head import TargetHead
from dspark_train.target.layers import default_taps, validate_taps
from dspark_train.target.model import Target, TargetOutput

__all__ = ["Target", "TargetHead", "TargetOutput", "default_taps", "validate_taps"]
