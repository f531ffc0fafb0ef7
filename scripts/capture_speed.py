"""Throughput of a capture against a bare forward of the same batches, side by side.

    python scripts/capture_speed.py runs/quickstart [--batches 12] [--minutes 3.5]

Interleaved batch by batch: the decoder alone, with taps, and with taps, encoding and writing. A
real capture writes a shard during the passes of the next one; here the writing of every batch is
waited for, so that its whole cost counts.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", help="of the store")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, default=3.5)
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    begin = time.perf_counter()
    rollout = Artifact.open(given.run / "rollout")
    name, dtype = (rollout.settings["target"][key] for key in ("name", "dtype"))
    target = Target.load(name, dtype=dtype, device=given.device)
    taps = default_taps(target.num_layers, given.taps)
    documents = RolloutDocuments(rollout, max_length=4096)
    order = sorted(range(len(documents)), key=lambda n: documents.lengths[n])
    every = list(batches(order, documents.lengths, given.batch_tokens))
    count = min(given.batches, len(every))
    # all lengths early on, should the time end before the batches
    chosen = [every[(2 * i + 1) * len(every) // (2 * count)] for i in range(count)]
    chosen = chosen[::2] + chosen[1::2]
    seconds: dict[str, list[float]] = {"bare": [], "taps": [], "capture": []}
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = ArtifactWriter(Path(folder) / "capture", "capture", {}, {})
        for number, batch in enumerate((chosen[0], *chosen)):
            rows = [documents.document(n) for n in batch]
            ids = [row.input_ids for row in rows]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(target.device)

            def capture(number=number, rows=rows, ids=ids) -> None:
                with FeatureWriter(artifact, dtype=given.dtype, taps=len(taps)) as writer:
                    labels = [int(row.loss_mask.sum()) for row in rows]
                    writer.begin(number, [len(row) for row in ids], labels)
                    for row, (features, hidden) in zip(
                        rows, target_states(target, ids, taps), strict=True
                    ):
                        writer.add(row.identity, row.input_ids, row.loss_mask, features, hidden)

            works: dict[str, Callable[[], object]] = {
                "bare": lambda padded=padded: target.forward(padded),
                "taps": lambda padded=padded: target.forward(padded, taps=taps),
                "capture": capture,
            }
            # each comes first in turn: what comes later finds warmer caches
            names = list(works)
            taken = {
                name: timed(works[name], target.device)
                for name in names[number % 3 :] + names[: number % 3]
            }
            if number:  # the first one only warms up
                tokens.append(sum(map(len, ids)))
                for name, one in taken.items():
                    seconds[name].append(one)
                if time.perf_counter() - begin > 60 * given.minutes:
                    break
    print(
        f"{name} in {dtype}, {len(tokens)} batches, {sum(tokens):,} tokens, stored as "
        f"{given.dtype}, taps {list(taps)}"
    )
    for name, taken in seconds.items():
        speed = sum(tokens) / sum(taken)
        ratio = statistics.median(
            bare / one for bare, one in zip(seconds["bare"], taken, strict=True)
        )
        print(f"{name:<9}{speed:>10,.0f} tokens/s   {100 * ratio:>6.1f} % of bare (median)")


if __name__ == "__main__":
    main()
