"""Prompts as token ids, encoded once by the target's own template."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dspark_train.config_data import PromptsConfig
from dspark_train.data.given import given_turns
from dspark_train.data.prompts import Prompt, PromptReader, UnusableError, split
from dspark_train.target import Target

Row = dict[str, Any]


def encode_prompts(p: PromptsConfig, turns: str, target: Target, path: Path) -> dict[str, Any]:
    """Write every usable prompt of a source to a JSONL file, one at a time.

    A row holds `id`, `category`, `split` and `prompt` (ids, with the start of the answer); with
    turns=every also `messages` and `later`, with turns=given the `turns` that are learnt from.

    Returns:
        Counts: read, kept, dropped by reason, and kept by split.

    Raises:
        ValueError: the source is missing or damaged, or nothing of it can be used.
    """
    reader = PromptReader(
        p.source,
        dataset_split=p.dataset_split,
        columns=p.columns,
        system_prompt=p.system_prompt,
        categories=p.categories,
        limit=p.limit,
        turns=turns,
    )
    splits: Counter[str] = Counter()
    refusal = ""
    with path.open("w") as file:
        for prompt in reader:
            part = split(prompt.id, calibration=p.calibration, held_out=p.held_out)
            try:
                row = _row(prompt, part, turns, target, p.template)
            except UnusableError as reason:
                reader.drop(str(reason))
            except (TemplateError, ValueError) as error:
                if not isinstance(error.__cause__ or error, TemplateError):
                    raise
                reader.drop("refused by the template")
                refusal = f"; the template says: {error}"
            else:
                splits[part] += 1
                file.write(json.dumps(row) + "\n")
    dropped = dict(sorted(reader.counts["dropped"].items()))
    counts = {**reader.counts, "dropped": dropped, "splits": dict(splits)}
    if not splits["train"]:
        raise ValueError(
            f"prompts.source={p.source} leaves no prompt to train on for target {target.name} "
            f"(context of {target.max_positions:,} tokens): {counts}{refusal}; give more "
            f"prompts, or hold fewer back than prompts.calibration={p.calibration} and "
            f"prompts.held_out={p.held_out}"
        )
    return counts


def _row(prompt: Prompt, part: str, turns: str, target: Target, template: dict[str, Any]) -> Row:
    row: Row = {"id": prompt.id, "category": prompt.category, "split": part}
    if turns == "given":
        answers = given_turns(target, prompt.messages, template)
        row |= {"prompt": answers[0][0], "turns": answers}
    else:
        row["prompt"] = target.encode_chat(prompt.messages, **template)
        if prompt.later:
            row |= {"messages": prompt.messages, "later": list(prompt.later)}
    if len(row["prompt"]) >= target.max_positions:
        raise UnusableError("too_long")
    return row


def given_rows(row: Row) -> Iterator[Row]:
    """Rows of a rollout for the answers that a source gives."""
    for turn, (prompt, response) in enumerate(row["turns"]):
        yield {
            "id": row["id"],
            "sample": 0,
            "turn": turn,
            "prompt": prompt,
            "response": response,
            "finish_reason": "given",
        }
