"""Throughput of a capture against a bare forward of the same batches, side by side.

    python scripts/capture_speed.py runs/quickstart [--batches 12] [--dtype bfloat16]

Interleaved batch by batch: the decoder alone, with taps, and with taps, encoding and writing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.data.forward import target_states
from dspark_train.data.layout import batches
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.data.writer import FeatureWriter
from dspark_train.target import Target, default_taps


def timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    rollout = Artifact.open(given.run / "rollout")
    target = Target.load(rollout.facts["target"]["name"], device=given.device)
    taps = default_taps(target.num_layers, given.taps)
    documents = RolloutDocuments(rollout, max_length=4096)
    order = sorted(range(len(documents)), key=lambda n: documents.lengths[n])
    every = list(batches(order, documents.lengths, given.batch_tokens))
    count = min(given.batches, len(every))
    chosen = [every[i * len(every) // count] for i in range(count)]
    seconds: dict[str, list[float]] = {"bare": [], "taps": [], "capture": []}
    with tempfile.TemporaryDirectory() as folder:
        artifact = ArtifactWriter(Path(folder) / "capture", "capture", {}, {})
        with FeatureWriter(artifact, dtype=given.dtype, taps=len(taps)) as writer:
            members = [n for batch in chosen for n in batch]
            writer.begin(
                0, [documents.lengths[n] for n in members], [documents.labels[n] for n in members]
            )
            for number, batch in enumerate((chosen[0], *chosen)):
                rows = [documents.document(n) for n in batch]
                ids = [row.input_ids for row in rows]
                padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(target.device)

                def capture(rows=rows, ids=ids, first=number == 0) -> None:
                    for row, (features, hidden) in zip(
                        rows, target_states(target, ids, taps), strict=True
                    ):
                        if not first:  # which only warms up
                            writer.add(row.identity, row.input_ids, row.loss_mask, features, hidden)

                works: dict[str, Callable[[], object]] = {
                    "bare": lambda padded=padded: target.forward(padded),
                    "taps": lambda padded=padded: target.forward(padded, taps=taps),
                    "capture": capture,
                }
                # each comes first in turn: what comes later finds warmer caches
                names = list(works)
                for name in names[number % 3 :] + names[: number % 3]:
                    work = works[name]
                    seconds[name].append(timed(work, target.device))
    tokens = [sum(documents.lengths[n] for n in batch) for batch in chosen]
    print(f"{target.name}, {count} batches, {sum(tokens):,} tokens, {given.dtype}, {list(taps)}")
    for name, taken in seconds.items():
        speed = sum(tokens) / sum(taken[1:])
        ratio = statistics.median(
            bare / one for bare, one in zip(seconds["bare"][1:], taken[1:], strict=True)
        )
        print(f"{name:<9}{speed:>10,.0f} tokens/s   {100 * ratio:>6.1f} % of bare (median)")


if __name__ == "__main__":
    main()
