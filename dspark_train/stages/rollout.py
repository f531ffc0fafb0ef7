"""prompts -> target responses, as token ids.

Prompts are encoded once, here, and kept with their split: later stages read ids and never the
template again. Answers are made and kept in shards of fixed prompts, each decoded on its own, so
that a killed run continues with the next shard and ends with the same tokens.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.prompts import load_prompts, split
from dspark_train.decoding.batch import Sampled, generate_batch
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.disk import check_space, sha256_file
from dspark_train.stages.stage import Outcome, said
from dspark_train.stages.targets import load_target, target_settings
from dspark_train.target import Target

PROMPTS = "prompts.jsonl"
PREFIX = "rollouts-"
# JSON of one token id, with room to spare
BYTES_PER_TOKEN = 8


def inputs(config: Config) -> tuple[str, ...]:
    return ()


def settings(config: Config) -> dict[str, Any]:
    source = Path(config.prompts.source)
    return {
        "target": target_settings(config),
        "prompts": asdict(config.prompts),
        "prompts_sha256": sha256_file(source) if source.is_file() else None,
        "rollout": asdict(config.rollout),
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Answer every training prompt `samples_per_prompt` times."""
    r = config.rollout
    target = load_target(config)
    prompts, counts = encode_prompts(config, target)
    asked = [
        (row, sample)
        for row in prompts
        if row["split"] == "train"
        for sample in range(r.samples_per_prompt)
    ]
    if not asked:
        raise ValueError(
            f"prompts.source={config.prompts.source} leaves no prompt to train on: {counts}"
        )
    check_space(writer.directory, len(asked) * r.max_new_tokens * BYTES_PER_TOKEN, "the rollout")
    writer.write(PROMPTS, "".join(json.dumps(row) + "\n" for row in prompts).encode())
    names = []
    with tqdm(total=len(asked), desc="rollout", unit="answer", mininterval=1) as bar:
        for start in range(0, len(asked), r.shard_prompts):
            names.append(f"{PREFIX}{len(names):05d}.jsonl")
            shard = asked[start : start + r.shard_prompts]
            if writer.has(names[-1]):
                bar.update(len(shard))
            else:
                lines = answer(config, target, shard, bar)
                writer.write(names[-1], "".join(json.dumps(row) + "\n" for row in lines).encode())
    finish, tokens, empty = Counter(), 0, 0
    for row in responses(writer.directory, names):
        finish[row["finish_reason"]] += 1
        tokens += len(row["response"])
        empty += not row["response"] or set(row["response"]) <= set(target.eos_ids)
    if empty == len(asked):
        raise ValueError(
            f"all {empty} responses of target {target.name} are empty: it ends its turn at once; "
            "is it an instruct model, and does its chat template fit it?"
        )
    return Outcome(
        counts={
            **counts,
            "splits": dict(Counter(row["split"] for row in prompts)),
            "responses": len(asked),
            "empty": empty,
            "response_tokens": tokens,
            "finish_reasons": dict(finish),
        },
        facts={
            "target": target.fingerprint(),
            "eos_ids": list(target.eos_ids),
            "shards": names,
            "template": config.prompts.template,
            "template_sha256": template_sha(target),
        },
        line=f"{len(asked):,} responses of {tokens:,} tokens to {len(prompts):,} prompts"
        + said(counts["dropped"]),
    )


def encode_prompts(config: Config, target: Target) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Prompts as token ids with their split; those that do not fit are dropped and counted."""
    p = config.prompts
    loaded, counts = load_prompts(
        p.source,
        dataset_split=p.dataset_split,
        columns=p.columns,
        system_prompt=p.system_prompt,
        limit=p.limit,
    )
    rows, too_long = [], 0
    for prompt in loaded:
        ids = target.encode_chat(prompt.messages, **p.template)
        if len(ids) >= target.max_positions:
            too_long += 1
            continue
        part = split(prompt.id, calibration=p.calibration, held_out=p.held_out)
        rows.append({"id": prompt.id, "category": prompt.category, "split": part, "prompt": ids})
    if not rows:
        raise ValueError(
            f"all {too_long} prompts of {p.source} are longer than the context of target "
            f"{target.name} ({target.max_positions} tokens)"
        )
    dropped = {**counts["dropped"], **({"too_long": too_long} if too_long else {})}
    return rows, {**counts, "kept": len(rows), "dropped": dropped}


def answer(
    config: Config, target: Target, shard: list[tuple[dict[str, Any], int]], bar: tqdm
) -> list[dict[str, Any]]:
    """Sample the responses of one shard. Each has a seed of its own, made of its identity."""
    r = config.rollout

    def seed(row: dict[str, Any], sample: int) -> int:
        key = json.dumps([r.seed, row["id"], sample]).encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")

    def progress(_: int, sampled: Sampled) -> None:
        tokens[0] += len(sampled.tokens)
        bar.update()
        bar.set_postfix(tokens=tokens[0], refresh=False)

    tokens = [0]
    sampled = generate_batch(
        target,
        [row["prompt"] for row, _ in shard],
        SamplingSettings(r.temperature, r.top_k, r.top_p, r.min_p),
        slots=r.batch_size,
        max_new_tokens=r.max_new_tokens,
        eos_ids=target.eos_ids,
        seeds=[seed(row, sample) for row, sample in shard],
        progress=progress,
    )
    return [
        {
            "id": row["id"],
            "sample": sample,
            "prompt": row["prompt"],
            "response": output.tokens,
            "finish_reason": output.finish_reason,
        }
        for (row, sample), output in zip(shard, sampled, strict=True)
    ]


def template_sha(target: Target) -> str:
    """Identifies the chat template (fault 45: another template is another artifact)."""
    template = json.dumps(target.tokenizer.chat_template, sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()


def responses(directory: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """All stored responses in order: id, sample, prompt, response, finish_reason."""
    for name in names:
        with (directory / name).open() as lines:
            yield from map(json.loads, lines)


def split_prompts(rollout: Artifact, part: str, count: int) -> list[dict[str, Any]]:
    """At most `count` encoded prompts of one split, spread evenly over the source's order.

    Raises:
        ValueError: the split is empty, or the file is damaged.
    """
    rows = [json.loads(line) for line in rollout.file(PROMPTS).read_text().splitlines()]
    chosen = [row for row in rows if row["split"] == part]
    if not chosen:
        raise ValueError(
            f"{rollout.directory} has no {part} prompts: give more prompts, or a larger "
            f"prompts.{part}"
        )
    if len(chosen) > count:
        chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    return chosen
