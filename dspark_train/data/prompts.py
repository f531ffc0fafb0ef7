"""Prompts: conversations that wait for an answer, from files or datasets, split by identity."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_train.data.sources import source_rows

FORMS = ("messages", "prompt", "turns")
COLUMNS = (*FORMS, "id", "category")
ROLES = ("system", "user", "assistant")
NOTED_LINES = 10

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One conversation whose next turn is the assistant's.

    Attributes:
        id: stable identity, the source's own or a hash of the messages.
        messages: turns with `role` and `content`; the last one is the user's.
        category: the source's label, or None.
    """

    id: str
    messages: Messages
    category: str | None = None


class UnusableError(Exception):
    """A row that gives no prompt; its text is the reason it is counted under."""


def load_prompts(
    source: str,
    *,
    dataset_split: str = "train",
    columns: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
    limit: int | None = None,
) -> tuple[list[Prompt], dict[str, Any]]:
    """Read prompts from a source.

    A row holds `messages` (role and content; trailing assistant turns are cut off), `prompt` (the
    user's text) or `turns` (the user's texts, of which the first is taken). Rows that repeat an
    identity or a whole conversation are dropped.

    Args:
        source: a `.jsonl` or `.parquet` file, or what `datasets.load_dataset` takes: a folder, or
            a name, optionally with a configuration as `name:configuration`.
        dataset_split: of a dataset; files have none.
        columns: our column names (`messages`, `prompt`, `turns`, `id`, `category`) -> the source's.
        system_prompt: put in front of conversations that have none. Not part of the identity.
        limit: stop after so many prompts.

    Returns:
        The prompts in the source's order, and counts with `read` = `kept` + the sum of `dropped`,
        which maps reasons to numbers; `malformed_lines` names the first few.

    Raises:
        ValueError: if the source is missing, empty or without a usable prompt, or if `columns`
            does not fit.
    """
    mapping = dict(columns or {})
    if unknown := sorted(set(mapping) - set(COLUMNS)):
        raise ValueError(f"prompts.columns has unknown keys {unknown}; expected {list(COLUMNS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"prompts.limit={limit}; expected at least 1, or null for all")
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    malformed: list[int] = []
    seen: set[str] = set()
    read = 0
    for number, row in source_rows(source, dataset_split):
        read += 1
        try:
            prompt = _prompt(row, mapping)
            content = _sha(prompt.messages)
            if prompt.id in seen or content in seen:
                raise UnusableError("duplicate")
        except UnusableError as reason:
            dropped[str(reason)] += 1
            if str(reason) == "malformed" and len(malformed) < NOTED_LINES:
                malformed.append(number)
            continue
        seen |= {prompt.id, content}
        if system_prompt and prompt.messages[0]["role"] != "system":
            prompt.messages.insert(0, {"role": "system", "content": system_prompt})
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    counts = {"read": read, "kept": len(prompts), "dropped": dict(sorted(dropped.items()))}
    if malformed:
        counts["malformed_lines"] = malformed
    if not prompts:
        found = f"all {read} rows were dropped ({counts['dropped']})" if read else "it is empty"
        wanted = [mapping.get(form, form) for form in _forms(mapping)]
        raise ValueError(
            f"prompts.source={source} has no usable prompt, {found}; expected rows with one of the "
            f"columns {wanted}, or other names in prompts.columns, e.g. {{prompt: question}}"
        )
    return prompts, counts


def split(prompt_id: str, *, calibration: float, held_out: float) -> str:
    """Which part a prompt belongs to: "train", "calibration" or "held_out".

    Decided by a hash of its identity alone, so it does not change when other prompts come or go,
    and several samples of one conversation stay together.

    Raises:
        ValueError: if the shares are negative or leave nothing to train on.
    """
    if calibration < 0 or held_out < 0 or calibration + held_out >= 1:
        raise ValueError(
            f"prompts.calibration={calibration} and prompts.held_out={held_out} must not be "
            "negative and must add up to less than 1"
        )
    place = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8]) / 2**64
    if place < held_out:
        return "held_out"
    return "calibration" if place < held_out + calibration else "train"


def _prompt(row: Any, columns: Mapping[str, str]) -> Prompt:
    if not isinstance(row, Mapping):
        raise UnusableError("malformed")
    form = next((form for form in _forms(columns) if columns.get(form, form) in row), None)
    if form is None:
        raise UnusableError("no prompt column")
    value = row[columns.get(form, form)]
    if form == "messages":
        messages = _messages(value)
    else:
        text = (value[0] if value else "") if isinstance(value, list) else value
        messages = _messages([{"role": "user", "content": text}])
    identity = row.get(columns.get("id", "id"))
    category = row.get(columns.get("category", "category"))
    return Prompt(
        id=_sha(messages) if identity is None else str(identity),
        messages=messages,
        category=None if category is None else str(category),
    )


def _forms(columns: Mapping[str, str]) -> Sequence[str]:
    return [form for form in FORMS if form in columns] or FORMS


def _messages(turns: Any) -> Messages:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UnusableError("empty" if turns is None else "malformed")
    messages = [{"role": turn.get("role"), "content": turn.get("content")} for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    roles = [message["role"] for message in messages]
    if not messages or not all(
        isinstance(message["content"], str) and message["content"].strip() for message in messages
    ):
        raise UnusableError("empty")
    if any(role not in ROLES for role in roles) or roles[-1] != "user" or "system" in roles[1:]:
        raise UnusableError("bad role")
    return messages


def _sha(messages: Messages) -> str:
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:32]
