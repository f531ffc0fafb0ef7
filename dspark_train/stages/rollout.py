"""prompts -> target responses, as token ids.

Prompts are encoded once, here, and kept with their split: later stages read ids and never the
template again. Answers are made and kept in shards of fixed prompts, each the work of one process
and each answer with a seed of its own: so processes share the shards out, and a run that was killed
continues with the next one and ends with the same tokens.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark_train import ranks
from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.answers import Answers, TargetAnswers
from dspark_train.data.conversation import answer_all
from dspark_train.data.encode import encode_prompts, given_rows
from dspark_train.data.endpoint import EndpointAnswers
from dspark_train.data.prompts import said_lines
from dspark_train.data.spread import spread
from dspark_train.decoding.loading import load_proposer
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.disk import check_space, nearest_folder, sha256_file, write_atomically
from dspark_train.stages.stage import Outcome, said
from dspark_train.stages.targets import load_target, target_settings
from dspark_train.target import Target

SHARED = True
PROMPTS = "prompts.jsonl"
COUNTS = "prompt_counts.json"
PREFIX = "rollouts-"
# JSON of one token id, with room to spare
BYTES_PER_TOKEN = 8
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FILTERS = {"top_k": 0, "min_p": 0.0}
# parts of the prompts that later stages read, beside "train"
PARTS = {"calibration": ("calibrate",), "held_out": ("export", "bench")}


def inputs(config: Config) -> tuple[str, ...]:
    return ()


def settings(config: Config) -> dict[str, Any]:
    source = Path(config.prompts.source)
    return {
        "target": target_settings(config),
        "prompts": asdict(config.prompts),
        "prompts_sha256": sha256_file(source) if source.is_file() else None,
        "rollout": asdict(config.rollout),
        # where the server is and how it is asked decides nothing
        "endpoint": {"model": config.endpoint.model if config.endpoint.url else None},
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Answer every training prompt `samples_per_prompt` times."""
    target, r = load_target(config), config.rollout
    answers = make_answers(config, target)
    counts = ranks.tell(prepare(config, target, writer) if ranks.first() else None)
    writer.begin_shared()
    total = counts["splits"]["train"] * r.samples_per_prompt
    names = [f"{PREFIX}{i:05d}.jsonl" for i in range(-(-total // r.shard_prompts))]
    bar = tqdm(total=total, desc="rollout", unit="answer", mininterval=1, disable=not ranks.first())
    tokens = 0

    def progress(new: int) -> None:
        nonlocal tokens
        tokens += new
        bar.update()
        bar.set_postfix(tokens=tokens, refresh=False)

    with bar:
        asked = to_answer(writer.path(PROMPTS), r.samples_per_prompt)
        for number, name in enumerate(names):
            shard = list(islice(asked, r.shard_prompts))
            if number % ranks.world_size() != ranks.rank() or writer.has(name):
                bar.update(len(shard))
                continue
            if r.turns == "given":
                lines = [line for row, _ in shard for line in given_rows(row)]
            else:
                lines = answer_all(
                    target,
                    answers,
                    shard,
                    seed=r.seed,
                    template=config.prompts.template,
                    progress=progress,
                )
            writer.write(name, "".join(json.dumps(line) + "\n" for line in lines).encode())
    ranks.wait()
    return outcome(config, target, counts, names, writer) if ranks.first() else Outcome({}, {}, "")


def prepare(config: Config, target: Target, writer: ArtifactWriter) -> dict[str, Any]:
    """Encode all prompts, unless an interrupted run has; returns their counts."""
    counted = writer.scratch / COUNTS
    if writer.has(PROMPTS) and counted.is_file():
        return json.loads(counted.read_text())
    r, run = config.rollout, writer.directory.parent
    # beside the run: what is in its folder stays until the prompts are known to be usable
    encoded = nearest_folder(run) / f".{run.name}-{PROMPTS}.tmp"
    try:
        counts = encode_prompts(config.prompts, r.turns, target, encoded)
        require_splits(config, counts["splits"])
        answers = counts["splits"]["train"] * r.samples_per_prompt
        check_space(writer.directory, answers * r.max_new_tokens * BYTES_PER_TOKEN, "the rollout")
        writer.begin()
        write_atomically(counted, json.dumps(counts).encode())
        writer.write(PROMPTS, encoded.replace)
    finally:
        encoded.unlink(missing_ok=True)
    return counts


def require_splits(config: Config, splits: Mapping[str, int]) -> None:
    """Refuse prompts that leave a later stage of this run without any, before hours are spent.

    Raises:
        ValueError: naming the part that is empty and the stages that read it.
    """
    for part, readers in PARTS.items():
        waiting = [stage for stage in readers if stage in config.stages]
        if waiting and not splits.get(part):
            raise ValueError(
                f"prompts.source={config.prompts.source} leaves no {part} prompts (kept: "
                f"{dict(splits)}), which {' and '.join(waiting)} will read: give more prompts, a "
                f"larger prompts.{part}={getattr(config.prompts, part)}, or fewer stages"
            )


def make_answers(config: Config, target: Target) -> Answers:
    """Who answers, as configured.

    Raises:
        ValueError: a drafter of another target.
    """
    r, e = config.rollout, config.endpoint
    penalties = {key: getattr(r, key) for key, off in PENALTIES.items() if getattr(r, key) != off}
    if e.url:
        filters = {key: getattr(r, key) for key, off in FILTERS.items() if getattr(r, key) != off}
        # what is off is not sent: top_k and others are additions to OpenAI's protocol
        sampling = {"temperature": r.temperature, "top_p": r.top_p, **filters, **penalties}
        return EndpointAnswers(e, target, sampling, max_new_tokens=r.max_new_tokens)
    return TargetAnswers(
        target,
        SamplingSettings(r.temperature, r.top_k, r.top_p, r.min_p, **penalties),
        slots=r.batch_size,
        max_new_tokens=r.max_new_tokens,
        proposer=load_proposer("drafter", r.checkpoint, target) if r.checkpoint else None,
    )


def outcome(
    config: Config,
    target: Target,
    counts: dict[str, Any],
    names: list[str],
    writer: ArtifactWriter,
) -> Outcome:
    """Count what all processes have answered.

    Raises:
        ValueError: all answers are empty.
    """
    finish, origins, seen = Counter(), Counter(), Counter()
    for row in responses(writer.directory, names):
        finish[row["finish_reason"]] += 1
        origins[row.get("origin", "generated")] += 1
        seen["responses"] += 1
        seen["response_tokens"] += len(row["response"])
        seen["empty"] += set(row["response"]) <= set(target.eos_ids)
        seen["degenerate"] += row.get("degenerate", False)
        seen["unanswered_turns"] += row.get("unanswered", 0)
    if seen["empty"] == seen["responses"]:
        raise ValueError(
            f"all {seen['empty']} responses of target {target.name} are empty: it ends its turn at "
            "once; is it an instruct model, and does its chat template fit it?"
        )
    line = f"{seen['responses']:,} responses of {seen['response_tokens']:,} tokens to "
    line += f"{counts['kept']:,} prompts{said(counts['dropped'])}{said_lines(counts)}"
    noted = {
        "ran into a loop": seen["degenerate"],
        "turns left": seen["unanswered_turns"],
        "do not round-trip": origins["differs"],
    }
    line += "".join(f"; {count:,} {what}" for what, count in noted.items() if count)
    return Outcome(
        counts={
            **counts,
            **seen,
            "finish_reasons": dict(sorted(finish.items())),
            "token_ids": dict(sorted(origins.items())),
        },
        facts={
            "target": target.fingerprint(),
            "eos_ids": list(target.eos_ids),
            "shards": names,
            "template": config.prompts.template,
            "template_sha256": template_sha(target),
        },
        line=line,
    )


def to_answer(prompts: Path, samples: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Every training prompt, as often as it is sampled, with the number of the sample."""
    with prompts.open() as lines:
        for row in map(json.loads, lines):
            if row["split"] == "train":
                yield from ((row, sample) for sample in range(samples))


def template_sha(target: Target) -> str:
    """Identifies the chat template (fault 45: another template is another artifact)."""
    template = json.dumps(target.tokenizer.chat_template, sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()


def responses(directory: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """All stored rows in order."""
    for name in names:
        with (directory / name).open() as lines:
            yield from map(json.loads, lines)


def split_prompts(rollout: Artifact, part: str, count: int) -> list[dict[str, Any]]:
    """At most `count` encoded prompts of one split, spread evenly over the source's order.

    Raises:
        ValueError: the split is empty, or the file is damaged.
    """
    with rollout.file(PROMPTS).open() as lines:
        chosen = [row for row in map(json.loads, lines) if row["split"] == part]
    if not chosen:
        raise ValueError(
            f"{rollout.directory} has no {part} prompts: give more prompts, or a larger "
            f"prompts.{part}"
        )
    return spread(chosen, count)
