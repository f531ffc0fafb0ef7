"""Which token stands in the slots of a block whose tokens are not known yet."""

from dspark_train.target.model import Target


def default_mask_token(target: Target) -> int:
    """A token of the target's vocabulary that no text uses.

    In this order: the tokenizer's own mask token, the first row of the embedding beyond the
    tokenizer, the first special token that neither ends, starts nor pads a text and that the chat
    template does not name.

    Raises:
        ValueError: there is none; `drafter.mask_token_id` must say which to take.
    """
    tokenizer = target.tokenizer
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None:
            return tokenizer.mask_token_id
        if len(tokenizer) < target.vocab_size:
            return len(tokenizer)
        roles = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        used = {*target.eos_ids, *roles}
        template = str(tokenizer.chat_template)
        for token, entry in sorted(tokenizer.added_tokens_decoder.items()):
            if entry.special and token not in used and entry.content not in template:
                return token
    raise ValueError(
        f"target {target.name} has no token that could serve as mask: name one that texts do not "
        f"use with drafter.mask_token_id=0…{target.vocab_size - 1}"
    )
