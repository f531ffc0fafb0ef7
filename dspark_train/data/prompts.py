"""Prompts: conversations that wait for an answer, from files or datasets, split by identity."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark_train.data.sources import source_rows

FORMS = ("messages", "prompt", "turns")
COLUMNS = (*FORMS, "id", "category")
ROLES = ("system", "user", "assistant")
TURNS = ("last", "every", "given")
NOTED_LINES = 10

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One conversation, and what of it the target shall say.

    Attributes:
        id: stable identity, the source's own or a hash of the messages.
        messages: turns with `role` and `content`; the last one is the user's, unless the answers
            are given.
        later: what the user says after the first answer, turn by turn.
        category: the source's label, or None.
    """

    id: str
    messages: Messages
    later: tuple[str, ...] = ()
    category: str | None = None


def said_lines(counts: Mapping[str, Any]) -> str:
    """Where the malformed rows are, to end a sentence with; nothing if there are none."""
    lines = counts.get("malformed_lines", [])
    more = ", …" if len(lines) < counts["dropped"].get("malformed", 0) else ""
    return f"; malformed: line {', '.join(map(str, lines))}{more}" if lines else ""


class UnusableError(Exception):
    """A row that gives no prompt; its text is the reason it is counted under."""


class PromptReader:
    """Prompts of a source, one by one in its order; about 70 bytes a row stay in memory.

    A row holds `messages` (role and content), `prompt` (the user's text) or `turns` (the user's
    texts). Rows that repeat an identity or a whole conversation are dropped.

    Attributes:
        counts: `read` = `kept` + the sum of `dropped`, which maps reasons to numbers;
            `malformed_lines` names the first few.
    """

    def __init__(
        self,
        source: str,
        *,
        dataset_split: str = "train",
        columns: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        categories: Sequence[str] | None = None,
        limit: int | None = None,
        turns: str = "last",
        key: str = "prompts.source",
    ) -> None:
        """Nothing is read yet.

        Args:
            source: a `.jsonl` or `.parquet` file, or what `datasets.load_dataset` takes: a folder,
                or a name, optionally with a configuration as `name:configuration`.
            dataset_split: of a dataset; files have none.
            columns: our column names (`messages`, `prompt`, `turns`, `id`, `category`) -> the
                source's.
            system_prompt: put in front of conversations that have none. Not part of the identity.
            categories: the only ones that are taken; None: all, those without one too.
            limit: stop after so many prompts.
            turns: "last": the last user's turn is answered, after the source's own answers (of
                `turns` the first one); "every": all are, one after the other, and the source's
                answers are left out; "given": none is, the source's answers are learnt from.
            key: the setting that named the source, for messages.

        Raises:
            ValueError: `columns`, `limit` or `turns` do not fit.
        """
        self.source, self.dataset_split, self.limit = source, dataset_split, limit
        self.key = key
        self.categories = None if categories is None else frozenset(categories)
        self.columns, self.system_prompt, self.turns = dict(columns or {}), system_prompt, turns
        if unknown := sorted(set(self.columns) - set(COLUMNS)):
            raise ValueError(
                f"prompts.columns has unknown keys {unknown}; expected {list(COLUMNS)}"
            )
        if limit is not None and limit < 1:
            raise ValueError(f"prompts.limit={limit}; expected at least 1, or null for all")
        if turns not in TURNS:
            raise ValueError(f"rollout.turns={turns}; expected one of {TURNS}")
        self._others: set[str] = set()
        self.counts: dict[str, Any] = {"read": 0, "kept": 0, "dropped": Counter()}

    def drop(self, reason: str) -> None:
        """Count a prompt that was given out as dropped after all."""
        self.counts["kept"] -= 1
        self.counts["dropped"][reason] += 1

    def __iter__(self) -> Iterator[Prompt]:
        """Read the source.

        Raises:
            ValueError: it is missing, empty or without a usable prompt.
        """
        counts, seen = self.counts, set()
        for number, row in source_rows(self.source, self.dataset_split, self.key):
            counts["read"] += 1
            try:
                prompt = self._prompt(row)
                # eight bytes of a hash: among a billion rows two may be taken for the same
                identity, content = _key(prompt.id), _key(_sha(prompt))
                if identity in seen or content in seen:
                    raise UnusableError("duplicate")
            except UnusableError as reason:
                counts["dropped"][str(reason)] += 1
                if str(reason) == "malformed":
                    lines = counts.setdefault("malformed_lines", [])
                    if len(lines) < NOTED_LINES:
                        lines.append(number)
                continue
            seen |= {identity, content}
            if self.system_prompt and prompt.messages[0]["role"] != "system":
                prompt.messages.insert(0, {"role": "system", "content": self.system_prompt})
            counts["kept"] += 1
            yield prompt
            if counts["kept"] == self.limit:
                return
        if not seen and set(counts["dropped"]) == {"other category"}:
            raise ValueError(
                f"prompts.categories={sorted(self.categories)}: none of the {counts['read']} rows "
                f"of {self.source} has one of them; expected some of {sorted(self._others)}"
            )
        if not seen:
            dropped = dict(sorted(counts["dropped"].items()))
            found = f"all {counts['read']} rows were dropped ({dropped}{said_lines(counts)})"
            wanted = [self.columns.get(form, form) for form in _forms(self.columns)]
            raise ValueError(
                f"{self.key}={self.source} has no usable prompt, "
                f"{found if counts['read'] else 'it is empty'}; expected rows with one of the "
                f"columns {wanted}, or other names in prompts.columns, e.g. {{prompt: question}}"
            )

    def _prompt(self, row: Any) -> Prompt:
        columns = self.columns
        if not isinstance(row, Mapping):
            raise UnusableError("malformed")
        form = next((form for form in _forms(columns) if columns.get(form, form) in row), None)
        if form is None:
            raise UnusableError("no prompt column")
        value = row[columns.get(form, form)]
        if form != "messages":
            texts = value if isinstance(value, list) else [value]
            value = [{"role": "user", "content": text} for text in texts or [""]]
        messages, later = _conversation(value, self.turns, form)
        identity = row.get(columns.get("id", "id"))
        category = row.get(columns.get("category", "category"))
        if self.categories is not None and category not in self.categories:
            if len(self._others) < NOTED_LINES:
                self._others.add(str(category))
            raise UnusableError("other category")
        prompt = Prompt("", messages, later, category=None if category is None else str(category))
        return replace(prompt, id=_sha(prompt) if identity is None else str(identity))


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


def _forms(columns: Mapping[str, str]) -> Sequence[str]:
    return [form for form in FORMS if form in columns] or FORMS


def _conversation(turns: Any, mode: str, form: str) -> tuple[Messages, tuple[str, ...]]:
    """What is asked first (or the whole, if answers are given), and what is asked later."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UnusableError("empty" if turns is None else "malformed")
    messages = [{"role": turn.get("role"), "content": turn.get("content")} for turn in turns]
    if mode == "last" and form == "turns":
        messages = messages[:1]
    cut = "user" if mode == "given" else "assistant"
    while messages and messages[-1]["role"] == cut:
        messages.pop()
    if mode == "given" and not messages:
        raise UnusableError("no answer")
    roles = [message["role"] for message in messages]
    if not messages or not all(
        isinstance(message["content"], str) and message["content"].strip() for message in messages
    ):
        raise UnusableError("empty")
    last = "assistant" if mode == "given" else "user"
    if any(role not in ROLES for role in roles) or roles[-1] != last or "system" in roles[1:]:
        raise UnusableError("bad role")
    if mode != "every":
        return messages, ()
    asked = [message for message in messages if message["role"] != "assistant"]
    first = 2 if asked[0]["role"] == "system" else 1
    return asked[:first], tuple(message["content"] for message in asked[first:])


def _sha(prompt: Prompt) -> str:
    content: Any = [prompt.messages, prompt.later] if prompt.later else prompt.messages
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
