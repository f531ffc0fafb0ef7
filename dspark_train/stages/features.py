"""The features that a capture settled: read from its store, or computed by the target."""

from dataclasses import replace
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.config import CaptureConfig, Config
from dspark_train.data.datamodule import Features
from dspark_train.data.online import OnlineFeatures
from dspark_train.data.store import FeatureStore
from dspark_train.stages.capture import make_plan
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.target import Target
from dspark_train.target.sharding import shard


def captured_as(config: Config, capture: Artifact) -> CaptureConfig:
    """The settings that a capture was made with, and the configured ones that decide nothing."""
    return replace(config.capture, **capture.settings["capture"])


def open_features(config: Config, capture: Artifact, target: Target) -> Features:
    """What training reads.

    Args:
        config: of the run; what the capture decided is taken from its manifest.
        capture: its artifact.
        target: used for online features, unless `capture.device` names a device of its own; with
            `capture.target_sharding=fsdp2` it is shared out for good.

    Raises:
        ValueError: a damaged store, rollouts other than those the capture was made of, or a target
            that cannot be sharded.
    """
    if capture.facts["mode"] == "offline":
        return FeatureStore(capture)
    rollout = Artifact.open(Path(config.run_dir) / "rollout")
    if rollout.contents != capture.manifest["inputs"]["rollout"]:
        raise ValueError(
            f"{rollout.directory} is not what {capture.directory} was made of: run the capture "
            "stage again with stages=[capture]"
        )
    c = captured_as(config, capture)
    if c.device is not None and torch.device(c.device) != target.device:
        config = replace(config, target=replace(config.target, device=c.device))
        target = load_target(config)
        require_same_target(target, capture.facts["target"], str(capture.directory))
    if c.target_sharding == "fsdp2":
        shard(target)
    plan = make_plan(c, rollout, target)
    return OnlineFeatures(
        plan.documents,
        plan.order,
        target,
        taps=plan.taps,
        dtype=c.dtype,
        batch_tokens=c.batch_tokens,
    )
