"""Speculative decoding with exact verification. Needs neither lightning nor hydra."""

from dspark_train.decoding.generate import SpeculativeDecoder
from dspark_train.decoding.generation_config import from_generation_config
from dspark_train.decoding.proposers import TreeShape

__all__ = ["SpeculativeDecoder", "TreeShape", "from_generation_config"]
