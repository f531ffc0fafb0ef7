"""frozen backbone -> Markov and confidence heads; drafts -> the confidence head once more."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dspark_train import ranks
from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.calibration.refit import refit
from dspark_train.config import Config
from dspark_train.decoding.request import Request
from dspark_train.decoding.stats import Round
from dspark_train.drafter import Drafter, load_drafter
from dspark_train.stages.features import open_features
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.stages.traces import decode_traced
from dspark_train.stages.train import decoding, train_part, train_settings

SHARED = True


def inputs(config: Config) -> tuple[str, ...]:
    sampled = config.heads.prefixes == "sampled"
    return ("capture", "train", "rollout") if sampled else ("capture", "train")


def settings(config: Config) -> dict[str, Any]:
    return {
        "objective": asdict(config.objective),
        "train": train_settings(config),
        "heads": asdict(config.heads),
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Train the heads of the drafter that the stage train left."""
    drafter = load_drafter(inputs["train"].folder("drafter"))
    outcome = Outcome({}, {}, "")
    if config.schedule == "staged":
        outcome = train_heads(config, writer, inputs["capture"], drafter)
    if config.heads.prefixes == "teacher" or not ranks.first():
        return outcome
    if config.schedule == "staged":
        drafter = load_drafter(writer.path("drafter"))
    return refit_confidence(config, writer, inputs["rollout"], drafter, outcome)


def train_heads(
    config: Config, writer: ArtifactWriter, capture: Artifact, drafter: Drafter
) -> Outcome:
    """Both heads on the features of the stage capture."""
    target = load_target(config)
    require_same_target(target, capture.facts["target"], str(capture.directory))
    head, features = target.head, open_features(config, capture, target)
    decode = decoding(config, target)
    del target  # unless it computes features or decodes, the rest of it need not stay in memory
    anchors = config.heads.anchors or config.train.anchors
    # heads have no matrices for Muon, and a learning rate of their own here
    own = replace(config.train, anchors=anchors, optimiser="adamw", lr_heads=None)
    return train_part(
        replace(config, train=own),
        writer,
        drafter,
        head,
        features,
        part="heads",
        epochs=config.heads.epochs,
        lr=config.heads.lr,
        decode=decode,
    )


def refit_confidence(
    config: Config, writer: ArtifactWriter, rollout: Artifact, drafter: Drafter, before: Outcome
) -> Outcome:
    """The confidence head on drafts, whose labels are exact, and the drafter written again."""
    h, dtype = config.heads, drafter.dtype
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    layer = drafter.confidence_head.proj
    read: list[torch.Tensor] = []
    inputs, labels, conversations = [], [], []

    def watch(requests: Sequence[Request], rounds: Sequence[Round]) -> None:
        # a step in which nobody drafts runs no head
        for i, (request, one) in enumerate(zip(requests, rounds, strict=True)):
            if one.judged:
                inputs.append(read[-1][i, : one.judged].float().cpu())
                labels.extend(one.overlap[: one.judged])
                conversations.extend([request.settings.seed] * one.judged)
        read.clear()

    prompts = split_prompts(rollout, "train", h.prompts)
    hook = layer.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        decode_traced(
            target,
            drafter,
            prompts,
            temperatures=[h.temperature],
            max_new_tokens=h.max_new_tokens,
            seed=h.seed,
            batch_size=h.batch_size,
            name="heads",
            watch=watch,
        )
    finally:
        hook.remove()
    drafter.to(device="cpu", dtype=dtype)
    if not inputs:
        raise ValueError(
            f"{len(prompts)} training prompts gave no verified draft: raise "
            f"heads.max_new_tokens={h.max_new_tokens} or heads.prompts={h.prompts}"
        )
    fitted = refit(
        torch.cat(inputs),
        torch.tensor(labels),
        torch.tensor(conversations),
        layer.weight.data[0],
        layer.bias.data[0],
    )
    layer.weight.data.copy_(fitted.weight[None])
    layer.bias.data.copy_(fitted.bias[None])
    writer.write("drafter", drafter.save_pretrained)
    numbers = {"drafts": len(labels), "pull": fitted.pull}
    numbers |= {"bce_teacher": round(fitted.before, 6), "bce_sampled": round(fitted.after, 6)}
    said = f"{before.line}, " if before.line else ""
    return replace(
        before,
        counts={**before.counts, "prompts": len(prompts), "drafts": len(labels)},
        facts={**before.facts, "prefixes": numbers},
        line=f"{said}confidence on {len(labels):,} drafts: cross-entropy {fitted.before:.4f} -> "
        f"{fitted.after:.4f} on conversations left out",
    )
