"""The drafter: a small bidirectional block model that reads the target's features."""

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.drafter import Drafter
from dspark_train.drafter.loading import load_config, load_drafter

__all__ = ["Drafter", "DrafterConfig", "load_config", "load_drafter"]
