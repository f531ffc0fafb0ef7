"""Checkpoints of the ecosystem: every published drafter in, every server out."""

from dspark_train.formats.reading import load_config, load_drafter
from dspark_train.formats.table import FORMATS, NATIVE, left_out
from dspark_train.formats.writing import write

__all__ = ["FORMATS", "NATIVE", "left_out", "load_config", "load_drafter", "write"]
