"""Documents through the frozen target, several in a pass: the features that are trained on."""

from collections.abc import Iterator, Sequence

import torch

from dspark_train.target import Target


def target_states(
    target: Target, documents: Sequence[torch.Tensor], taps: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over documents of token ids `[T]`.

    Yields:
        For each, features `[T, M·D]` and last hidden states `[T, D]`, views of the pass's output on
        the target's device.
    """
    # padded on the right: causal attention never looks there
    ids = torch.nn.utils.rnn.pad_sequence([d.long() for d in documents], batch_first=True)
    output = target.forward(ids.to(target.device), taps=taps)
    for row, document in enumerate(documents):
        length = len(document)
        yield output.features[row, :length], output.last_hidden[row, :length]
