"""Speculative decoding with exact verification. Needs neither lightning nor hydra."""

from dspark_train.decoding.generate import SpeculativeDecoder
from dspark_train.decoding.generation_config import from_generation_config

__all__ = ["SpeculativeDecoder", "from_generation_config"]
