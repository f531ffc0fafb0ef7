"""held-out decoding traces -> one temperature per proposal for the confidence head."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.calibration import (
    expected_calibration_error,
    fit_temperatures,
    prefix_confidence,
)
from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.stats import Round
from dspark_train.drafter import load_drafter
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings


def trained(config: Config) -> str:
    """The stage that left the finished drafter."""
    return "heads" if config.schedule == "staged" else "train"


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout", trained(config))


def settings(config: Config) -> dict[str, Any]:
    return {"target": target_settings(config), "calibrate": asdict(config.calibrate)}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Decode calibration prompts, keep the traces, fit the temperatures."""
    rollout, drafted = inputs["rollout"], inputs[trained(config)]
    c = config.calibrate
    drafter = load_drafter(drafted.folder("drafter"))
    if drafter.confidence_head is None:
        facts = {"temperatures": None}
        return Outcome({}, facts, "no confidence head, nothing to calibrate")
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    decoder = SpeculativeDecoder.with_drafter(target, drafter)
    prompts = split_prompts(rollout, "calibration", c.prompts)
    rounds: list[Round] = []
    for turn, row in enumerate(tqdm(prompts, desc="calibrate", unit="prompt", mininterval=1)):
        decoder.generate(
            row["prompt"],
            c.max_new_tokens,
            temperature=c.temperature,
            seed=c.seed + turn,
            trace=rounds.append,
        )
    proposals = drafter.slots.num_proposals
    rounds = [r for r in rounds if r.proposed]
    padded = [r.confidence + [0.0] * (proposals - r.proposed) for r in rounds]
    traces = {
        "logits": torch.tensor(padded).view(-1, proposals),
        "accepted": torch.tensor([r.accepted for r in rounds], dtype=torch.int64),
        "known": torch.tensor([known(r) for r in rounds], dtype=torch.int64),
    }
    if not len(traces["accepted"]):
        raise ValueError(
            f"{len(prompts)} calibration prompts gave no round with a proposal: raise "
            f"calibrate.max_new_tokens={c.max_new_tokens} or calibrate.prompts={c.prompts}"
        )
    writer.write("traces.safetensors", lambda path: save_file(traces, path))
    temperatures = fit_temperatures(**traces)
    before = errors(traces, torch.ones(proposals))
    after = errors(traces, temperatures)
    facts = {
        "temperatures": [round(t, 4) for t in temperatures.tolist()],
        "ece_before": before,
        "ece_after": after,
    }
    writer.write("temperatures.json", json.dumps(facts, indent=1).encode())
    return Outcome(
        counts={"prompts": len(prompts), "rounds": len(traces["accepted"])},
        facts=facts,
        line=f"{len(traces['accepted']):,} rounds, calibration error "
        f"{100 * sum(before) / proposals:.1f} % -> {100 * sum(after) / proposals:.1f} % "
        "(mean over slots, on the same rounds)",
    )


def known(round_: Round) -> int:
    """Leading drafts of a round of which it is known whether the prefix up to them passed.

    After a rejection that is all of them; where the text ended inside the block, nothing is known
    of what came after the end.
    """
    return round_.proposed if round_.judged > round_.accepted else round_.accepted


def errors(traces: Mapping[str, torch.Tensor], temperatures: torch.Tensor) -> list[float]:
    """Calibration error of the cumulative product, per proposal, where a round reached it."""
    predicted = prefix_confidence(traces["logits"], temperatures)
    result = []
    for k in range(predicted.shape[1]):
        seen = traces["known"] > k
        observed = traces["accepted"][seen] > k
        result.append(round(float(expected_calibration_error(predicted[seen, k], observed)), 6))
    return result
