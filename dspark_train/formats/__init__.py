"""Checkpoints of the ecosystem: every published drafter in, every server out."""

from dspark_train.formats.destinations import FORMATS, NATIVE, refuse_uncarried, what_is_left_out
from dspark_train.formats.reading import load_config, load_drafter
from dspark_train.formats.writing import write

__all__ = [
    "FORMATS",
    "NATIVE",
    "load_config",
    "load_drafter",
    "refuse_uncarried",
    "what_is_left_out",
    "write",
]
