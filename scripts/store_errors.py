"""Bytes and errors of a feature store by dtype, against float32, on the documents of a rollout.

    python scripts/store_errors.py runs/quickstart [--documents 24] [--taps 5]

The effect on τ is measured by training on each (see README, Features).
"""

import argparse
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.data.encoding import STORED, decode, encode, token_bytes
from dspark_train.data.forward import target_states
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.target import Target, default_taps


def row_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Mean over rows of ‖found − true‖ / ‖true‖."""
    return float(((found.float() - true).norm(dim=-1) / true.norm(dim=-1)).mean())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--taps", type=int, default=5)
    given = parser.parse_args()
    rollout = Artifact.open(given.run / "rollout")
    recorded = rollout.facts["target"]
    target = Target.load(recorded["name"], revision=recorded["revision"], dtype="float32")
    taps = default_taps(target.num_layers, given.taps)
    documents = RolloutDocuments(rollout, max_length=1024)
    count = min(given.documents, len(documents))
    chosen = [documents.document(i * len(documents) // count) for i in range(count)]
    states = [next(target_states(target, [d.input_ids], taps)) for d in chosen]
    features = torch.cat([f for f, _ in states])
    hidden = torch.cat([h[:-1][d.loss_mask[1:]] for d, (_, h) in zip(chosen, states, strict=True)])
    probs = target.head.logits(hidden).softmax(-1)
    supervised = len(hidden) / len(features)
    print(
        f"{target.name}: {count} documents, {len(features):,} tokens, "
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


if __name__ == "__main__":
    main()
