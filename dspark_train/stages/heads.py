"""frozen backbone -> Markov and confidence heads (schedule staged)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.drafter import load_drafter
from dspark_train.stages.features import open_features
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.stages.train import train_part, train_settings


def inputs(config: Config) -> tuple[str, ...]:
    return ("capture", "train")


def settings(config: Config) -> dict[str, Any]:
    return {
        "objective": asdict(config.objective),
        "train": train_settings(config),
        "heads": asdict(config.heads),
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Train the heads of the drafter that the stage train left."""
    capture, train = inputs["capture"], inputs["train"]
    target = load_target(config)
    require_same_target(target, capture.facts["target"], str(capture.directory))
    drafter = load_drafter(train.folder("drafter"))
    head, features = target.head, open_features(config, capture, target)
    del target  # unless it computes features, the rest of it need not stay in memory
    anchors = config.heads.anchors or config.train.anchors
    return train_part(
        replace(config, train=replace(config.train, anchors=anchors)),
        writer,
        drafter,
        head,
        features,
        part="heads",
        epochs=config.heads.epochs,
        lr=config.heads.lr,
    )
