"""Which tokens a drafter with a vocabulary of its own may draft."""

import torch

from dspark_train.data.datamodule import Features


def frequent_tokens(store: Features, size: int, vocabulary: int) -> tuple[torch.Tensor, float]:
    """The tokens that the responses use most.

    Args:
        store: the captured rollouts; only supervised tokens are counted.
        size: how many tokens are wanted.
        vocabulary: tokens of the target, padding of its LM head not counted.

    Returns:
        Their ids `[size]`, ascending, and the share of all counted tokens that they are.

    Raises:
        ValueError: more tokens are wanted than there are.
    """
    if size > vocabulary:
        raise ValueError(
            f"drafter.draft_vocab_size={size}, but the target has {vocabulary} tokens: take fewer, "
            "or null for all of them"
        )
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for number in range(len(store)):
        input_ids, loss_mask = store.tokens(number)
        counts += torch.bincount(input_ids[loss_mask.bool()].long(), minlength=vocabulary)
    # stable: of equally frequent tokens the ones with the lower ids
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1))
