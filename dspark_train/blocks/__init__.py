"""Index arithmetic of drafted blocks: slots, anchors, mask. No model, no floating point."""

from dspark_train.blocks.anchors import eligible_anchors, sample_anchors
from dspark_train.blocks.mask import ContextSpan, Sight
from dspark_train.blocks.slots import BlockSlots

__all__ = ["BlockSlots", "ContextSpan", "Sight", "eligible_anchors", "sample_anchors"]
