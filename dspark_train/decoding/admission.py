"""From what a user asks to a request that can run, or an error that says why it cannot."""

import reprlib
from collections.abc import Mapping, Sequence
from operator import index

from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.text import TextStream
from dspark_train.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def admit(
    target: Target,
    vocabulary: int,
    prompt: Prompt,
    max_new_tokens: int,
    settings: SamplingSettings,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    logprobs: int | None = None,
) -> Request:
    """Encode and check a request.

    Args:
        target: the frozen model.
        vocabulary: usable ids.
        prompt: text (tokenised as it is), chat messages (through the target's template), or ids.
        max_new_tokens: at least 1; cut to what the context leaves.
        settings: how to sample.
        stop: strings that end the text.
        eos_ids: ids that end the output; None takes the target's, () none.
        logprobs: alternatives that are reported with every new token; None reports nothing.

    Raises:
        ValueError: naming what is wrong with the request.
    """
    ids, tokenizer = encode(target, prompt), target.tokenizer
    room = target.max_positions - len(ids)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}, expected a whole number from 1 on")
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if room < 1:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the context of target {target.name} "
            f"{target.max_positions} positions: shorten it by at least {1 - room}"
        )
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} in the prompt, expected ids from 0 to {vocabulary - 1}")
    wrong = next((token for token in settings.named_ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(
            f"token id {wrong} in the sampling settings, expected ids from 0 to {vocabulary - 1}"
        )
    if logprobs is not None and not 0 <= logprobs <= vocabulary:
        raise ValueError(f"logprobs={logprobs}, expected 0 to {vocabulary}, or None for none")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops or (stops and tokenizer is None):
        raise ValueError(f"stop={stops!r}: expected strings that are not empty, and a tokenizer")
    return Request(
        ids,
        settings,
        min(max_new_tokens, room),
        target.eos_ids if eos_ids is None else tuple(eos_ids),
        None if tokenizer is None else TextStream(tokenizer, stops),
        logprobs,
    )


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt of any kind.

    Raises:
        ValueError: no prompt of any kind; text or messages for a target without tokenizer or chat
            template.
    """
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError(f"target {target.name} has no tokenizer: give the prompt as token ids")
        return list(target.tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return target.encode_chat(prompt)
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise ValueError(
            f"prompt={reprlib.repr(prompt)}, expected text, a list of messages, or token ids"
        ) from None
