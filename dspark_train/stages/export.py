"""drafter + temperatures -> a safetensors checkpoint, read back and checked before it is done."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.disk import check_space
from dspark_train.drafter import Drafter, DrafterConfig, load_drafter
from dspark_train.stages.calibrate import trained
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings

CHECK_TOKENS = 48


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout", trained(config), "calibrate")


def settings(config: Config) -> dict[str, Any]:
    return {"target": target_settings(config), "export": asdict(config.export)}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Write the checkpoint and decode with what was written."""
    rollout, drafted = inputs["rollout"], inputs[trained(config)]
    drafter = load_drafter(drafted.folder("drafter"))
    refuse_untrained(drafter)
    drafter.config.confidence_temperatures = inputs["calibrate"].facts["temperatures"]
    drafter.to(getattr(torch, config.export.dtype))
    size = sum(p.numel() * p.element_size() for p in drafter.parameters())
    check_space(writer.directory, size, "the checkpoint")

    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    prompt = split_prompts(rollout, "held_out", 1)[0]["prompt"]
    folder = writer.path("checkpoint")
    writer.write("checkpoint", drafter.save_pretrained)
    compare(folder, drafter, target, prompt)
    if config.export.push_to_hub:
        drafter.push_to_hub(config.export.push_to_hub)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Outcome(
        counts={"bytes": size, "parameters": sum(p.numel() for p in drafter.parameters())},
        facts={"checkpoint": "checkpoint", "target": rollout.facts["target"]},
        line=f"{size / 1e6:.1f} MB, read back and decoded with",
    )


def refuse_untrained(drafter: Drafter) -> None:
    """Refuse weights that training never touched (fault 27: norms that are all 1.0).

    Raises:
        ValueError: naming the parameters.
    """
    untouched = [
        name
        for name, parameter in drafter.named_parameters()
        if ("norm" in name and bool((parameter == 1).all()))
        or (name.endswith("markov_w2.weight") and not bool(parameter.any()))
    ]
    if untouched:
        raise ValueError(
            f"the drafter to export is untrained, these weights are as initialised: {untouched}; "
            "train for more steps"
        )


def compare(folder: Any, drafter: Drafter, target: Any, prompt: list[int]) -> None:
    """Decode greedily with the drafter in memory and with the files; everything must be equal.

    Raises:
        ValueError: a weight, a setting, a drafted confidence or a token differs.
    """
    reloaded = load_drafter(folder)
    for key in DrafterConfig.__annotations__:
        read, meant = getattr(reloaded.config, key), getattr(drafter.config, key)
        if read != meant:
            raise ValueError(f"{folder}/config.json says {key}={read}, exported was {meant}")
    written = reloaded.state_dict()
    for name, tensor in drafter.state_dict().items():
        if not torch.equal(written[name], tensor):
            raise ValueError(f"{folder}: {name} differs from what was exported")
    outputs = []
    for model in (drafter, reloaded):
        rounds: list[Any] = []
        decoder = SpeculativeDecoder.with_drafter(target, model)
        result = decoder.generate(prompt, CHECK_TOKENS, trace=rounds.append)
        outputs.append((result.tokens, [(r.accepted, r.confidence) for r in rounds]))
    if outputs[0] != outputs[1]:
        raise ValueError(f"{folder} decodes differently from the drafter it was written from")
