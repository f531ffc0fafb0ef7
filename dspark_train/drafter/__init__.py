"""The drafter: a small bidirectional block model that reads the target's features."""

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.drafter import Drafter

__all__ = ["Drafter", "DrafterConfig"]
