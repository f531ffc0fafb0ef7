"""held-out decoding traces -> a shift and a temperature for the confidence of each proposal."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.calibration import Scaling
from dspark_train.calibration.diagram import reliability_figure
from dspark_train.calibration.report import report
from dspark_train.calibration.traces import Traces
from dspark_train.config import Config
from dspark_train.drafter import load_drafter
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings
from dspark_train.stages.traces import decode_traced


def trained(config: Config) -> str:
    """The stage that left the finished drafter."""
    return "heads" if config.heads_apart else "train"


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout", trained(config))


def settings(config: Config) -> dict[str, Any]:
    return {"target": target_settings(config), "calibrate": asdict(config.calibrate)}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Decode calibration prompts, fit on one half of the conversations, report on the other."""
    rollout, drafted = inputs["rollout"], inputs[trained(config)]
    c = config.calibrate
    drafter = load_drafter(drafted.folder("drafter"))
    if drafter.confidence_head is None:
        facts = {"temperatures": None}
        return Outcome({}, facts, "no confidence head, nothing to calibrate")
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    prompts = split_prompts(rollout, "calibration", c.prompts)
    if len(prompts) < 2:
        raise ValueError(
            f"{len(prompts)} calibration prompt: expected at least 2, some to fit on and others to "
            "report on; raise calibrate.prompts or prompts.calibration"
        )
    rounds = decode_traced(
        target,
        drafter,
        prompts,
        temperatures=c.temperatures,
        max_new_tokens=c.max_new_tokens,
        seed=c.seed,
        batch_size=c.batch_size,
        name="calibrate",
    )
    traces = Traces.collect(rounds, drafter.slots.num_proposals)
    if len(traces.conversation.unique()) < 2:
        raise ValueError(
            f"{len(prompts)} calibration prompts gave {len(traces)} rounds with a proposal, in "
            "fewer than 2 conversations: raise "
            f"calibrate.max_new_tokens={c.max_new_tokens} or calibrate.prompts={c.prompts}"
        )
    require_finite(traces)
    writer.write("traces.safetensors", traces.save)
    fit, fresh = traces.halves()
    scaling = Scaling.fit(fit.logits, fit.accepted, fit.known)
    shared = scaling.without_slots(fit.logits, fit.accepted, fit.known)
    slots = report(fit, fresh, scaling, shared)
    facts = {
        "shift": round(scaling.shift, 4),
        "slot_shifts": [round(s, 4) for s in scaling.slot_shifts.tolist()],
        "temperatures": [round(t, 4) for t in scaling.temperatures.tolist()],
        "unshifted_temperatures": [round(t, 4) for t in shared.temperatures.tolist()],
        "ece_before": errors(slots, "before"),
        "ece_after": errors(slots, "after"),
        "ece_unshifted": errors(slots, "shared"),
        "rounds": {"fit": len(fit), "report": len(fresh)},
        "domains": domains(traces),
        "slots": slots,
    }
    writer.write("temperatures.json", json.dumps(facts, indent=1).encode())
    figure = reliability_figure(fresh, scaling)
    writer.write("reliability.png", lambda path: figure.savefig(path, format="png", dpi=120))
    before, after = (sum(facts[key]) / len(facts[key]) for key in ("ece_before", "ece_after"))
    return Outcome(
        counts={"prompts": len(prompts), "rounds": len(traces)},
        facts=facts,
        line=f"{len(traces):,} rounds, calibration error {100 * before:.1f} % -> "
        f"{100 * after:.1f} % (mean over slots, on the half that was not fitted)",
    )


def errors(slots: list[dict[str, Any]], way: str) -> list[float]:
    """Calibration errors of a way of scaling, of the slots that both halves reached."""
    return [slot[way]["ece"] for slot in slots if way in slot]


def require_finite(traces: Traces) -> None:
    """Refuse what no calibration can be fitted on.

    Raises:
        ValueError: with how many confidence logits are not numbers.
    """
    broken = ~traces.logits.isfinite()
    if broken.any():
        raise ValueError(
            f"{int(broken.sum())} confidence logits in {int(broken.any(1).sum())} of "
            f"{len(traces)} rounds are not finite: the confidence head is broken, train it again "
            "(force=[train], or force=[heads] with schedule=staged)"
        )


def scaling_of(calibrate: Artifact) -> Scaling | None:
    """What was fitted, None without a confidence head. Older runs have temperatures alone."""
    facts = calibrate.facts
    if facts["temperatures"] is None:
        return None
    temperatures = torch.tensor(facts["temperatures"], dtype=torch.float64)
    slots = torch.tensor(facts.get("slot_shifts", [0.0] * len(temperatures)))
    return Scaling(facts.get("shift", 0.0), slots, temperatures)


def domains(traces: Traces) -> dict[str, dict[str, float]]:
    """Per domain, its rounds and the mean accepted drafts: what is easy and what is hard."""
    found = {}
    for number, name in enumerate(traces.domains):
        accepted = traces.accepted[traces.domain == number].double()
        found[name] = {"rounds": len(accepted), "accepted": round(float(accepted.mean()), 4)}
    return found
