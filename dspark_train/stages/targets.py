"""The target as configured, checked against what the artifacts were made with."""

from dataclasses import asdict
from typing import Any

import torch

from dspark_train.config import Config
from dspark_train.target import Target


def device(config: Config) -> str:
    """`target.device`, with "auto" resolved."""
    if config.target.device != "auto":
        return config.target.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(config: Config) -> Target:
    """Load the configured target."""
    t = config.target
    return Target.load(
        t.name,
        revision=t.revision,
        dtype=t.dtype,
        device=device(config),
        attn_implementation=t.attn_implementation,
        cache_dir=t.cache_dir,
    )


def target_settings(config: Config) -> dict[str, Any]:
    """What of the target's configuration determines its numbers (device and cache do not)."""
    keep = ("name", "revision", "dtype", "attn_implementation")
    return {key: value for key, value in asdict(config.target).items() if key in keep}


def require_same_target(target: Target, expected: dict[str, Any], made: str) -> None:
    """Refuse a target other than the one that `made` was made with.

    Raises:
        ValueError: the weights or the configuration differ; both are named.
    """
    found = target.fingerprint()
    if any(found[key] != expected[key] for key in ("config_sha", "weights_sha")):
        raise ValueError(
            f"{made} was made with target {expected['name']!r} "
            f"(weights {expected['weights_sha'][:12]}), but target.name={found['name']!r} has "
            f"weights {found['weights_sha'][:12]}: use that target, or redo the stages before"
        )
