"""The target as configured, checked against what the artifacts were made with."""

from dataclasses import asdict, replace
from typing import Any

import torch

from dspark_train.config import Config
from dspark_train.target import Target
from dspark_train.target.cpu import fast_dtype


def device(config: Config) -> torch.device:
    """`target.device`, with "auto" resolved.

    Raises:
        ValueError: torch has no such device here.
    """
    name = config.target.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"target.device={name}: no such device here ({reason}); take auto, cpu, or one that "
            "torch can use"
        ) from error


def settled(config: Config) -> Config:
    """The settings with what "auto" means on this machine where it decides results: dtypes.

    Raises:
        ValueError: torch has no such device here.
    """
    fast = fast_dtype(device(config))
    precision = "bf16-mixed" if fast == torch.bfloat16 else "32-true"
    target, train = config.target, config.train
    if target.dtype == "auto":
        target = replace(target, dtype=str(fast).removeprefix("torch."))
    if train.precision == "auto":
        train = replace(train, precision=precision)
    return replace(config, target=target, train=train)


def load_target(config: Config, *, stock: bool = False) -> Target:
    """Load the configured target; `stock`: as transformers alone would, for baselines."""
    t = config.target
    return Target.load(
        t.name,
        revision=t.revision,
        dtype=t.dtype,
        device=str(device(config)),
        attn_implementation=t.attn_implementation,
        cache_dir=t.cache_dir,
        pack=t.pack and not stock,
        graphs=t.graphs and not stock,
        compile=t.compile and not stock,
    )


def target_settings(config: Config) -> dict[str, Any]:
    """What of the target's configuration determines its numbers (device and cache do not)."""
    keep = ("name", "revision", "dtype", "attn_implementation", "pack")
    return {key: value for key, value in asdict(config.target).items() if key in keep}


def require_same_target(target: Target, expected: dict[str, Any] | None, made: str) -> None:
    """Refuse a target other than the one that `made` was made with, if that is on record.

    Raises:
        ValueError: the weights or the configuration differ; both are named.
    """
    found = target.fingerprint()
    for key in ("config_sha", "weights_sha"):
        recorded = (expected or {}).get(key)
        if recorded is not None and found[key] != recorded:
            what = key.removesuffix("_sha")
            half = " (float16 rounds the smallest weights away, so this may be the dtype alone)"
            hint = half if target.dtype == torch.float16 and key == "weights_sha" else ""
            raise ValueError(
                f"{made} was made with target {expected['name']!r} ({what} {recorded[:12]}), but "
                f"target {found['name']!r} has {what} {found[key][:12]}{hint}: use that "
                f"target, or make {made} again with this one"
            )
