"""Ready-made conversations: which tokens are the assistant's, turn by turn.

By the template's own generation markers where it has them, else by rendering the conversation up to
each answer and with it: the difference is the answer. Never by searching for text.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dspark_train.data.prompts import Messages, UnusableError
from dspark_train.target import Target

MARKER = re.compile(r"\{%-?\s*generation\b")
Turn = tuple[list[int], list[int]]


def given_turns(target: Target, messages: Messages, template: dict[str, Any]) -> list[Turn]:
    """(ids before an answer, ids of the answer with its EOS) for every answer.

    Args:
        target: whose template and EOS count.
        messages: a whole conversation.
        template: arguments of the chat template.

    Raises:
        UnusableError: the mask is all ones or all zeros, does not have one part for every answer,
            an answer has no EOS, or the template renders a beginning otherwise than the whole.
    """
    answers = sum(message["role"] == "assistant" for message in messages)
    marked = MARKER.search(str(target.tokenizer.chat_template))
    turns = (
        _by_markers(target, messages, template) if marked else _rendered(target, messages, template)
    )
    if not turns or not all(answer for _, answer in turns):
        raise UnusableError("mask all zeros")
    if not turns[0][0]:
        raise UnusableError("mask all ones")
    if len(turns) != answers or (marked and not _fit(target, messages, template, turns)):
        raise UnusableError("mask does not fit the turns")
    if target.eos_ids and not all(answer[-1] in target.eos_ids for _, answer in turns):
        raise UnusableError("answer without EOS")
    return turns


def _by_markers(target: Target, messages: Messages, template: dict[str, Any]) -> list[Turn]:
    rendered = target.tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **template
    )
    ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
    turns = []
    for value, run in groupby(range(len(ids)), key=lambda place: mask[place]):
        places = list(run)
        start, end = places[0], places[-1] + 1
        if value:
            # many templates end the marked part before the EOS
            end += (
                end < len(ids) and ids[end - 1] not in target.eos_ids and ids[end] in target.eos_ids
            )
            turns.append((ids[:start], ids[start:end]))
    return turns


def _fit(
    target: Target, messages: Messages, template: dict[str, Any], turns: Sequence[Turn]
) -> bool:
    """Whether every marked part lies between what is rendered before its answer and with it."""
    plain = {**template, "add_generation_prompt": False}
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, (before, answer) in zip(places, turns, strict=True):
        least = len(target.encode_chat(messages[:place], **plain)) if place else 0
        most = len(target.encode_chat(messages[: place + 1], **plain))
        if not least <= len(before) < len(before) + len(answer) <= most:
            return False
    return True


def _rendered(target: Target, messages: Messages, template: dict[str, Any]) -> list[Turn]:
    turns = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = target.encode_chat(messages[:place], **template)
            whole = target.encode_chat(
                messages[: place + 1], **{**template, "add_generation_prompt": False}
            )
            if whole[: len(before)] != before:
                raise UnusableError("template renders beginnings otherwise")
            turns.append((before, _to_eos(whole[len(before) :], target.eos_ids)))
    return turns


def _to_eos(answer: list[int], eos_ids: Sequence[int]) -> list[int]:
    """Up to the last EOS: what templates put behind it belongs to the next turn."""
    last = max((place for place, token in enumerate(answer) if token in eos_ids), default=None)
    return answer if last is None else answer[: last + 1]
