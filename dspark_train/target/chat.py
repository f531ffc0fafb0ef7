"""Conversations to token ids by the target's own chat template, and which ids end a response."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode_chat(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[dict[str, str]],
    **template_args: Any,
) -> list[int]:
    """Token ids of a conversation with the start of the assistant's turn.

    Args:
        name: of the target, for messages.
        tokenizer: its tokenizer.
        messages: `role` and `content` of each turn.
        template_args: passed to the chat template, e.g. `enable_thinking=False`.

    Raises:
        ValueError: if there is no chat template or the template refuses the messages.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            f"target {name} has no chat template; use an instruct model, or pass token ids"
        )
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    try:
        return list(tokenizer.apply_chat_template(list(messages), **(settings | template_args)))
    except TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"the chat template of target {name} refuses roles {roles}: {error}"
        ) from error


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Token ids that end a response: the generation config's, else the tokenizer's, else none."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return tuple(dict.fromkeys(eos)) if isinstance(eos, list) else (eos,)
