"""Speculative decoding with exact verification. Needs neither lightning nor hydra."""

from dspark_train.decoding.generate import SpeculativeDecoder

__all__ = ["SpeculativeDecoder"]
