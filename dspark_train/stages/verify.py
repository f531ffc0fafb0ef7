"""`stages=[verify]`: is everything in a run still what was written, and true to the target?"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.aside import MANIFEST
from dspark_train.config import Config
from dspark_train.data.forward import target_states
from dspark_train.data.shard import Document
from dspark_train.data.store import FeatureStore
from dspark_train.stages.capture import Plan, make_plan
from dspark_train.stages.features import captured_as
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.target import Target

# relative to the size of a row: eight bits and other batches stay far below, foreign rows are at 1
MOST = 0.2


def settings(config: Config) -> dict[str, object]:
    return {}


def run(config: Config) -> None:
    """Check all finished artifacts of a run; then features against rollouts and the target.

    Raises:
        ValueError: all files that are wrong, or the first document that is, by name.
    """
    found = sorted(path.parent for path in Path(config.run_dir).glob(f"*/{MANIFEST}"))
    if not found:
        raise ValueError(f"run_dir={config.run_dir} has no finished stage to verify")
    artifacts, wrong = {}, []
    for folder in found:
        try:
            artifact = artifacts[folder.name] = Artifact.open(folder)
        except ValueError as error:
            wrong.append(str(error))
            continue
        damaged = []
        for file in artifact.names():
            try:
                artifact.file(file)
            except ValueError as error:
                damaged.append(str(error))
        wrong += damaged
        size = sum(written for written, _ in artifact.files.values())
        if not damaged:
            line = f"{len(artifact.files):,} files, {size:,} bytes: as written"
            print(f"verify     {folder.name:<10} {line}")
    if wrong:
        raise ValueError("\n  ".join(wrong))
    capture = artifacts.get("capture")
    if capture is not None and capture.facts["mode"] == "offline":
        print(f"verify     {verify_features(config, artifacts['rollout'], capture)}")


def verify_features(config: Config, rollout: Artifact, capture: Artifact) -> str:
    """Compare a store with the rollouts (all of it) and with fresh passes (a random sample).

    Raises:
        ValueError: naming the shard and the document that differ.
    """
    if rollout.contents != capture.manifest["inputs"]["rollout"]:
        raise ValueError(f"{capture.directory} was not made of what is in {rollout.directory}")
    target, store = load_target(config), FeatureStore(capture)
    require_same_target(target, capture.facts["target"], str(capture.directory))
    store.check_finite()
    plan = make_plan(captured_as(config, capture), rollout, target)
    if len(store) != len(plan.order):
        raise ValueError(
            f"{capture.directory} has {len(store)} documents, the rollouts {len(plan.order)}"
        )
    for number, row in enumerate(plan.order):
        expected, (ids, mask) = plan.documents.document(row), store.tokens(number)
        same = torch.equal(ids.long(), expected.input_ids) and torch.equal(
            mask.bool(), expected.loss_mask
        )
        if not same or store.identities[number] != expected.identity:
            raise ValueError(
                f"{store.shard_of(number)}: document {store.identities[number]} has other tokens "
                f"than the rollout's document {expected.identity}: redo it with force=[capture]"
            )
    worst = max(sampled_errors(config, target, store, plan))
    return (
        f"features   finite, {store.num_tokens:,} tokens as in the rollouts; "
        f"{min(config.capture.verify_documents, len(store))} documents by a fresh pass: "
        f"relative error at most {worst:.2g}"
    )


def sampled_errors(
    config: Config, target: Target, store: FeatureStore, plan: Plan
) -> Iterator[float]:
    """Relative errors of every tap and of the last hidden states, of a random sample."""
    count = min(config.capture.verify_documents, len(store))
    for number in random.sample(range(len(store)), count):
        document = store.document(number)
        [states] = target_states(target, [document.input_ids], plan.taps)
        for what, error in errors(document, *states, len(plan.taps)).items():
            if not error < MOST:
                raise ValueError(
                    f"{store.shard_of(number)}: {what} of document {store.identities[number]} are "
                    f"off by {error:.2f} of their size from a fresh pass of target {target.name}: "
                    "redo it with force=[capture]"
                )
            yield error


def errors(
    document: Document, features: torch.Tensor, last_hidden: torch.Tensor, taps: int
) -> dict[str, float]:
    """‖stored − fresh‖ / ‖fresh‖ of each tap and of the last hidden states."""
    fresh = {
        f"features of tap {m}": pair
        for m, pair in enumerate(
            zip(document.features.chunk(taps, -1), features.chunk(taps, -1), strict=True)
        )
    }
    kept = last_hidden[document.label_rows.to(last_hidden.device)]
    fresh["last hidden states"] = (document.last_hidden, kept)
    # rows are weighted alike: the huge ones of the first positions must not hide the others
    return {
        what: float(
            (
                (stored.float() - true.cpu().float()).norm(dim=-1) / true.cpu().float().norm(dim=-1)
            ).mean()
        )
        for what, (stored, true) in fresh.items()
        if len(true)
    }
