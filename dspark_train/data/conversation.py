"""Conversations answered turn by turn: every answer becomes a part of the next prompt."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from dspark_train.data.answers import Answers, Progress
from dspark_train.data.repetition import is_degenerate
from dspark_train.target import Target

Row = dict[str, Any]


class _Talk:
    """One sample of one conversation, and what was said so far."""

    def __init__(self, row: Row, sample: int) -> None:
        self.row, self.sample = row, sample
        self.prompt: list[int] = row["prompt"]
        self.messages = list(row.get("messages", ()))
        self.later = list(row.get("later", ()))
        self.lines: list[Row] = []


def seed_of(seed: int, identity: str, sample: int, turn: int) -> int:
    """The seed of one answer: of its identity alone, so that order and company do not matter."""
    key = [seed, identity, sample] + ([turn] if turn else [])
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big")


def answer_all(
    target: Target,
    answers: Answers,
    asked: Sequence[tuple[Row, int]],
    *,
    seed: int,
    template: dict[str, Any],
    progress: Progress,
) -> list[Row]:
    """Answer conversations to their ends, all of a turn together.

    A conversation ends early where an answer was cut by its length, or where the next prompt does
    not fit into the context or the template; its last row counts the turns left in `unanswered`.

    Args:
        target: its template and tokenizer make the next prompt of an answer.
        answers: who answers.
        asked: stored prompts (`id`, `prompt`; `messages` and `later` if there is more than one
            turn), with the number of the sample.
        seed: of the rollout; every answer gets one of its own from it.
        template: arguments of the chat template.
        progress: see `Answers`.

    Returns:
        Rows as they are stored, conversation by conversation in the order of `asked`.
    """
    talks = [_Talk(row, sample) for row, sample in asked]
    active, turn = talks, 0
    while active:
        said = answers(
            [talk.prompt for talk in active],
            [seed_of(seed, talk.row["id"], talk.sample, turn) for talk in active],
            progress,
        )
        for talk, answer in zip(active, said, strict=True):
            line = {
                "id": talk.row["id"],
                "sample": talk.sample,
                "turn": turn,
                "prompt": talk.prompt,
                "response": answer.tokens,
                "finish_reason": answer.finish_reason,
            }
            if answer.origin != "generated":
                line["origin"] = answer.origin
            if is_degenerate(answer.tokens, target.eos_ids):
                line["degenerate"] = True
            talk.lines.append(line)
        active = [talk for talk in active if talk.later and _go_on(target, talk, template)]
        turn += 1
    for talk in talks:
        if talk.later:
            talk.lines[-1]["unanswered"] = len(talk.later)
    return [line for talk in talks for line in talk.lines]


def _go_on(target: Target, talk: _Talk, template: dict[str, Any]) -> bool:
    """Make the next prompt of a conversation; false if it has to end."""
    last = talk.lines[-1]
    if last["finish_reason"] != "stop":
        return False
    text = target.tokenizer.decode(last["response"], skip_special_tokens=True)
    talk.messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": talk.later[0]},
    ]
    try:
        prompt = target.encode_chat(talk.messages, **template)
    except ValueError as error:
        if isinstance(error.__cause__, TemplateError):
            return False
        raise
    if len(prompt) >= target.max_positions:
        return False
    # ids as generated, not as tokenised again, wherever the template leaves history alone
    before = last["prompt"] + last["response"]
    text_before = target.tokenizer.decode(before)
    whole = target.tokenizer.decode(prompt)
    if prompt[: len(before)] != before and whole.startswith(text_before):
        rest = target.tokenizer.encode(whole[len(text_before) :], add_special_tokens=False)
        prompt = before + rest
    talk.prompt = prompt
    del talk.later[0]
    return True
