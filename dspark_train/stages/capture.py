"""responses -> target features: one frozen forward per document, taps on a few layers."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.store import FeatureWriter
from dspark_train.disk import check_space
from dspark_train.stages.rollout import responses
from dspark_train.stages.stage import Outcome, said
from dspark_train.stages.targets import load_target, require_same_target, target_settings
from dspark_train.target import Target
from dspark_train.target.layers import default_taps, validate_taps

# documents of like length share a forward pass; sorting happens inside windows of this many
WINDOW = 512


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout",)


def settings(config: Config) -> dict[str, Any]:
    return {"target": target_settings(config), "capture": asdict(config.capture)}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Store the features of every response that has something to supervise."""
    rollout, c = inputs["rollout"], config.capture
    for name in rollout.facts["shards"]:
        rollout.file(name)  # refuses damaged files
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    taps = (
        default_taps(target.num_layers, c.num_taps)
        if c.taps is None
        else validate_taps(c.taps, target.num_layers)
    )
    documents, dropped = [], {}
    for row in responses(rollout.directory, rollout.facts["shards"]):
        length = len(row["prompt"]) + len(row["response"])
        # an anchor needs a supervised successor, so one token alone teaches nothing
        reason = (
            "short" if len(row["response"]) < 2 else "too_long" if length > c.max_length else None
        )
        if reason:
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            documents.append(row)
    if not documents:
        raise ValueError(
            f"{rollout.directory} has no response to learn from: {dropped} of "
            f"{rollout.counts['responses']} (short: fewer than 2 tokens; too_long: more than "
            f"capture.max_length={c.max_length})"
        )
    width = {"float32": 4, "bfloat16": 2}[c.dtype] * target.hidden_size
    tokens = sum(len(row["prompt"]) + len(row["response"]) for row in documents)
    labels = sum(len(row["response"]) for row in documents)
    need = (tokens * len(taps) + labels) * width + 5 * tokens
    check_space(writer.directory, need, "the feature store")

    store = FeatureWriter(writer, dtype=c.dtype, shard_bytes=c.shard_mb * 2**20)
    with tqdm(
        total=len(documents), initial=store.done, desc="capture", unit="doc", mininterval=1
    ) as bar:
        for row, features, last_hidden in captured(
            target, documents, store.done, taps, c.batch_tokens
        ):
            ids = torch.tensor(row["prompt"] + row["response"])
            mask = torch.zeros(len(ids), dtype=torch.bool)
            mask[len(row["prompt"]) :] = True
            store.add(row["id"], ids, mask, features, last_hidden)
            bar.update()
    counts = store.close()
    return Outcome(
        counts={
            "read": rollout.counts["responses"],
            "kept": len(documents),
            "dropped": dropped,
            **counts,
        },
        facts={
            "target": rollout.facts["target"],
            "taps": list(taps),
            "dtype": c.dtype,
            "hidden_size": target.hidden_size,
            "bytes_per_token": counts["bytes"] / counts["tokens"],
        },
        line=f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, "
        f"{counts['bytes'] / 1e6:,.0f} MB, taps {list(taps)}" + said(dropped),
    )


def captured(
    target: Target,
    documents: list[dict[str, Any]],
    done: int,
    taps: tuple[int, ...],
    batch_tokens: int,
) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
    """Features `[T, M·D]` and last hidden states `[T, D]` of each document, in store order.

    The order (by length inside fixed windows) and the batches depend on the documents alone; the
    first `done` documents are not computed again unless they share a batch with a later one.
    """
    number = 0
    for start in range(0, len(documents), WINDOW):
        window = sorted(
            documents[start : start + WINDOW],
            key=lambda row: len(row["prompt"]) + len(row["response"]),
        )
        for batch in batches(window, batch_tokens):
            number += len(batch)
            if number <= done:
                continue
            rows = [torch.tensor(row["prompt"] + row["response"]) for row in batch]
            lengths = [len(ids) for ids in rows]
            # padded on the right: causal attention never looks there
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(target.device)
            output = target.forward(ids, taps=taps)
            skip = max(0, done - (number - len(batch)))
            for i in range(skip, len(batch)):
                n = lengths[i]
                yield batch[i], output.features[i, :n], output.last_hidden[i, :n]


def batches(rows: list[dict[str, Any]], tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Consecutive rows whose padded size stays within `tokens` (one row at least)."""
    batch: list[dict[str, Any]] = []
    for row in rows:
        length = len(row["prompt"]) + len(row["response"])  # ascending: the longest so far
        if batch and (len(batch) + 1) * length > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
