"""Bytes and errors of a feature store by dtype, against float32, on the documents of a rollout.

    python scripts/store_errors.py runs/quickstart [--documents 24] [--taps 5]
    python scripts/store_errors.py runs/quickstart --train [--epochs 4]

With --train, the effect on τ: the run's training again, once for every dtype, with its settings and
seed, on its own capture. What a store of fewer bits would give is rounded from that capture as it
is read, to the same numbers. Validation documents are never rounded: τ is of the same numbers for
all. Nothing of the run is changed. A row for float32 needs a capture in float32 (capture.dtype).
"""

import argparse
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config, DrafterSettings, ObjectiveConfig, TargetConfig
from dspark_train.config_training import TrainConfig
from dspark_train.data.datamodule import split_validation
from dspark_train.data.encoding import STORED, decode, encode, token_bytes
from dspark_train.data.forward import target_states
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.data.shard import Document
from dspark_train.data.spread import spread
from dspark_train.data.store import FeatureStore
from dspark_train.noise import silence_libraries
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.stages.train import new_drafter, train_part
from dspark_train.target import Target, default_taps


class Rounded(FeatureStore):
    """A store as one of another dtype would be; the documents `exact` stay as they are."""

    def __init__(self, capture: Artifact, dtype: str, exact: Collection[int]) -> None:
        super().__init__(capture)
        self.rounded_to, self.exact = dtype, frozenset(exact)
        self.taps = len(capture.facts["taps"])

    def document(self, number: int) -> Document:
        found = super().document(number)
        if number in self.exact or self.rounded_to == self.dtype:
            return found
        return replace(
            found,
            features=decode(*encode(found.features, self.rounded_to, self.taps)),
            last_hidden=decode(*encode(found.last_hidden, self.rounded_to, 1)),
        )


def trained_like(run: Path, epochs: int | None) -> Config:
    """The settings that the training of a run was made with."""
    kept = Artifact.open(run / "train").settings
    train = TrainConfig(**kept["train"])
    return Config(
        name=run.name,
        run_dir=str(run),
        schedule=kept["schedule"],
        target=TargetConfig(**Artifact.open(run / "capture").settings["target"]),
        drafter=DrafterSettings(**kept["drafter"]),
        objective=ObjectiveConfig(**kept["objective"]),
        train=replace(train, epochs=epochs or train.epochs),
    )


def train_on_each(run: Path, epochs: int | None) -> None:
    """Train on the run's capture in its own dtype and in all smaller ones; print τ of each."""
    silence_libraries()
    config, capture = trained_like(run, epochs), Artifact.open(run / "capture")
    dtype, counts = capture.facts["dtype"], capture.counts
    if dtype not in ("float32", "bfloat16") or not counts["shards"]:
        raise SystemExit(
            f"error: {capture.directory} holds {counts['shards']} shards of {dtype}: expected some "
            "of float32 or bfloat16, of which other dtypes can be made; capture with one of these"
        )
    target = load_target(config)
    require_same_target(target, capture.facts["target"], str(capture.directory))
    exact = FeatureStore(capture)
    held = split_validation(exact.identities, config.train.validation)[1]
    if not held:
        raise SystemExit(
            f"error: train.validation={config.train.validation} of {run} holds no document back"
        )
    supervised = counts["label_rows"] / counts["tokens"]
    print(
        f"{target.name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
        f"{config.train.epochs} epochs each, seed {config.train.seed}; τ on {len(held)} validation "
        f"documents in {dtype}\n{'dtype':<9}{'B/token':>9}{'τ':>9}{'to ' + dtype:>13}{'s':>8}"
    )
    first = None
    for other in list(STORED)[list(STORED).index(dtype) :]:
        begin = time.perf_counter()
        store = Rounded(capture, other, held)
        drafter, _ = new_drafter(config, target, store, capture.facts)
        with tempfile.TemporaryDirectory() as folder:
            outcome = train_part(
                config,
                ArtifactWriter(Path(folder) / other, "train", {}, {}),
                drafter,
                target.head,
                store,
                part="all" if config.schedule == "joint" else "backbone",
                epochs=config.train.epochs,
                lr=config.train.lr,
                decode=None,
            )
        tau = outcome.counts["metrics"]["validation/tau"]
        first = first or tau
        size = token_bytes(other, target.hidden_size, store.taps, supervised)
        print(
            f"{other:<9}{size:>9,.0f}{tau:>9.4f}{100 * (tau / first - 1):>+12.2f}%"
            f"{time.perf_counter() - begin:>8.0f}",
            flush=True,
        )


def row_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Mean over rows of ‖found − true‖ / ‖true‖."""
    return float(((found.float() - true).norm(dim=-1) / true.norm(dim=-1)).mean())


@torch.inference_mode()
def compare_numbers(run: Path, count: int, num_taps: int) -> None:
    """Print bytes and errors of every dtype, of features and of the target's distributions."""
    rollout = Artifact.open(run / "rollout")
    recorded = rollout.facts["target"]
    target = Target.load(recorded["name"], revision=recorded["revision"], dtype="float32")
    taps = default_taps(target.num_layers, num_taps)
    documents = RolloutDocuments(rollout, max_length=1024)
    chosen = [documents.document(number) for number in spread(range(len(documents)), count)]
    states = [next(target_states(target, [d.input_ids], taps)) for d in chosen]
    features = torch.cat([f for f, _ in states])
    hidden = torch.cat([h[:-1][d.loss_mask[1:]] for d, (_, h) in zip(chosen, states, strict=True)])
    probs = target.head.logits(hidden).softmax(-1)
    supervised = len(hidden) / len(features)
    print(
        f"{target.name}: {len(chosen)} documents, {len(features):,} tokens, "
        f"{100 * supervised:.0f} % supervised, taps {list(taps)}"
    )
    names = [f"tap {i}" for i in taps]
    print(
        f"{'dtype':<9}{'B/token':>9}{'Qwen3-4B':>10}"
        + "".join(f"{name:>9}" for name in names)
        + f"{'last':>9}{'TV mean':>9}{'TV max':>9}{'argmax':>9}"
    )
    for dtype in STORED:
        stored = decode(*encode(features, dtype, len(taps)))
        last = decode(*encode(hidden, dtype, 1)).float()
        errors = [
            row_error(x, y)
            for x, y in zip(stored.chunk(len(taps), -1), features.chunk(len(taps), -1), strict=True)
        ]
        other = target.head.logits(last).softmax(-1)
        distance = (other - probs).abs().sum(-1) / 2
        same = (other.argmax(-1) == probs.argmax(-1)).float().mean()
        here = token_bytes(dtype, target.hidden_size, len(taps), supervised)
        print(
            f"{dtype:<9}{here:>9,.0f}{token_bytes(dtype, 2560, 5, supervised):>10,.0f}"
            + "".join(f"{100 * error:>8.3f}%" for error in (*errors, row_error(last, hidden)))
            + f"{distance.mean():>9.5f}{distance.max():>9.5f}{100 * same:>8.2f}%"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="τ after training on each dtype")
    parser.add_argument("--epochs", type=int, help="of each training; default: those of the run")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.train:
        train_on_each(given.run, given.epochs)
    else:
        compare_numbers(given.run, given.documents, given.taps)


if __name__ == "__main__":
    main()
