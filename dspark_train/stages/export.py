"""drafter + temperatures -> checkpoints, each read back and decoded with before it is done."""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.disk import check_space
from dspark_train.drafter import Drafter, DrafterConfig, load_drafter
from dspark_train.formats import NATIVE, refuse_uncarried, what_is_left_out, write
from dspark_train.formats.card import Measured, Story, card
from dspark_train.formats.check import reload
from dspark_train.stages.calibrate import scaling_of, trained
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings
from dspark_train.target import Target
from dspark_train.target.cpu import weight_bytes
from dspark_train.target.licence import licence_of

CHECK_TOKENS = 48
# what the model cards tell; `bench` tells it again with what it measured
STORY = "story.json"


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout", trained(config), "calibrate")


def settings(config: Config) -> dict[str, Any]:
    return {"target": target_settings(config), "export": asdict(config.export)}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Write every format and decode with what was written."""
    rollout, drafted = inputs["rollout"], inputs[trained(config)]
    drafter = load_drafter(drafted.folder("drafter"))
    refuse_untrained(drafter)
    require_as_recorded(drafter.config, drafted)
    calibrate(drafter, inputs["calibrate"])
    drafter.to(getattr(torch, config.export.dtype))
    # bench and generate decode with our own
    formats = [NATIVE, *(name for name in config.export.formats if name != NATIVE)]
    for name in formats:
        refuse_uncarried(name, drafter.config)
    size = weight_bytes(drafter)
    check_space(writer.directory, size * len(formats), "the checkpoints")

    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    prompt = split_prompts(rollout, "held_out", 1)[0]["prompt"]
    story = tell(config, inputs, drafted)
    fitted = inputs["calibrate"].facts
    calibration = {
        "dataset": config.prompts.source,
        "num_samples": inputs["calibrate"].counts.get("rounds", 0),
        "ece_before": fitted.get("ece_before"),
        # older runs have temperatures alone
        "ece_after": fitted.get("ece_unshifted", fitted.get("ece_after")),
    }
    for name in formats:
        place = folder_of(name)
        said = card(name, drafter.config, story)

        def build(folder: Path, name: str = name, said: str = said) -> None:
            write(
                folder,
                name,
                drafter,
                target.head,
                architectures=[type(target.model).__name__],
                calibration=calibration,
            )
            (folder / "README.md").write_text(said)

        writer.write(place, build)
        compare(writer.path(place), name, drafter, target, prompt)
        for note in what_is_left_out(name, drafter.config):
            print(f"export     {note}")
    told = json.dumps(asdict(story), indent=1, default=str)
    writer.write(STORY, told.encode())
    if config.export.push_to_hub:
        push(writer.path("checkpoint"), config.export.push_to_hub)
    return Outcome(
        counts={"bytes": size, "parameters": sum(p.numel() for p in drafter.parameters())},
        facts={
            "checkpoint": "checkpoint",
            "formats": {name: folder_of(name) for name in formats},
            "target": rollout.facts["target"],
        },
        line=f"{size / 1e6:.1f} MB as {', '.join(formats)}, read back and decoded with",
    )


@torch.no_grad()
def calibrate(drafter: Drafter, fitted: Artifact) -> None:
    """Let the confidences of a drafter that was trained be those that were fitted."""
    scaling = scaling_of(fitted)
    if scaling is None:
        return
    drafter.confidence_head.proj.bias += scaling.shift
    drafter.config.confidence_shifts = fitted.facts.get("slot_shifts")
    drafter.config.confidence_temperatures = fitted.facts["temperatures"]
    drafter.config.unshifted_temperatures = fitted.facts.get("unshifted_temperatures")


def folder_of(name: str) -> str:
    """Where a format lies inside the artifact."""
    return "checkpoint" if name == NATIVE else f"formats/{name}"


def push(folder: Path, repository: str) -> None:
    """Upload a checkpoint; the repository is made if there is none."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=str(folder))


def push_card(card: Path, repository: str) -> None:
    """Upload a card to where the checkpoint was uploaded."""
    from huggingface_hub import HfApi

    HfApi().upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repository)


def tell(config: Config, inputs: Mapping[str, Artifact], drafted: Artifact) -> Story:
    """What the artifacts say about how the drafter was made and how far it guesses."""
    rollout, calibrate = inputs["rollout"], inputs["calibrate"]
    metrics = drafted.counts.get("metrics", {})
    measured = []
    if (tau := metrics.get("validation/tau")) is not None:
        keys = sorted(key for key in metrics if key.startswith("validation/acceptance_"))
        acceptance = [metrics[key] for key in keys]
        what = "validation documents, expected from the distributions"
        measured.append(Measured(what, "temperature 1", tau, acceptance))
    if calibrate.facts.get("temperatures") is not None:
        accepted = load_file(calibrate.file("traces.safetensors"))["accepted"].float()
        c = config.calibrate
        what = f"{c.prompts} calibration prompts, {len(accepted)} rounds decoded"
        sampler = ", ".join(f"temperature {t}" if t else "greedy" for t in c.temperatures)
        measured.append(Measured(what, sampler, 1 + accepted.mean().item()))
    return Story(
        recipe={key: value for key, value in drafted.settings.items() if isinstance(value, dict)},
        data={
            "prompts": config.prompts.source,
            **{key: value for key, value in rollout.counts.items() if not isinstance(value, dict)},
            "rollout": rollout.settings.get("rollout"),
            "trained on": {k: drafted.counts.get(k) for k in ("documents", "tokens", "steps")},
        },
        measured=measured,
        licence=licence_of(rollout.facts["target"]["name"]),
    )


def require_as_recorded(config: DrafterConfig, drafted: Artifact) -> None:
    """The conventions that a decoder depends on are those of the manifest (faults 24, 26, 29).

    Raises:
        ValueError: naming both sides.
    """
    recorded = drafted.facts.get("drafter", {})
    for key in ("target_layer_ids", "block_size", "mask_token_id", "sample_from_anchor"):
        found = getattr(config, key)
        if (meant := recorded.get(key, found)) != found:
            raise ValueError(
                f"{drafted.directory}/drafter/config.json says {key}={found}, but the manifest "
                f"beside it {meant}: redo the stage with force=[{drafted.directory.name}]"
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
        or (name.endswith(("markov_w2.weight", "kernel_projection.weight")) and not parameter.any())
    ]
    if untouched:
        raise ValueError(
            f"the drafter to export is untrained, these weights are as initialised: {untouched}; "
            "train for more steps"
        )


def compare(
    folder: Path, name: str, drafter: Drafter, target: Target, prompt: list[int] | str
) -> None:
    """Read a checkpoint back and decode greedily with the drafter in memory and with the files.

    Raises:
        ValueError: a weight, a setting, a logit, a drafted confidence or a token differs.
    """
    reloaded = reload(folder, name, drafter, target.head)
    drafter = copy.deepcopy(drafter)
    if name != NATIVE:  # it is said that these are left out
        drafter.config.confidence_shifts = None
    outputs = []
    # a decoder moves its drafter to the target's dtype, which formats yet to be written do not have
    for model in (drafter, reloaded):
        rounds: list[Any] = []
        decoder = SpeculativeDecoder.with_drafter(target, model)
        result = decoder.generate(prompt, CHECK_TOKENS, trace=rounds.append)
        confident = reloaded.confidence_head is not None
        told = [(r.accepted, r.confidence if confident else None) for r in rounds]
        outputs.append((result.tokens, told))
    if outputs[0] != outputs[1]:
        raise ValueError(f"{folder} decodes differently from the drafter it was written from")
