"""Features without a store: the frozen target computes them as they are asked for."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dspark_train import ranks
from dspark_train.data.encoding import decode, encode
from dspark_train.data.forward import target_states
from dspark_train.data.layout import batches
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.data.shard import Document, label_rows
from dspark_train.target import Target


class OnlineFeatures:
    """What a `FeatureStore` gives, computed by the target from the rollouts' token ids.

    The documents have the numbers that they would have in a store of the same settings, and their
    features are rounded as there. With `batch_tokens=1` every document has a forward pass of its
    own in both modes, and on a CPU the numbers agree to the last bit; else documents share passes
    with others, which changes the order of sums in the last bits.

    Of a target that is sharded all processes ask at the same time, each for documents of its own.

    Attributes:
        directory, identities, lengths: as of a store.
        dtype: as which a store would keep the numbers.
    """

    def __init__(
        self,
        documents: RolloutDocuments,
        order: Sequence[int],
        target: Target,
        *,
        taps: Sequence[int],
        dtype: str,
        batch_tokens: int,
    ) -> None:
        """Nothing is computed yet.

        Args:
            documents: of the rollout.
            order: their numbers in the order of a store, see `layout.plan_shards`.
            target: on the device where the features shall be computed, and stay.
            taps: layers that are tapped.
            dtype: a key of `encoding.STORED`.
            batch_tokens: padded tokens of a forward pass at most.
        """
        self._documents, self._order, self._target = documents, order, target
        self._taps, self.dtype, self._batch_tokens = taps, dtype, batch_tokens
        self.directory: Path = documents.directory
        self.identities = [documents.identities[n] for n in order]
        self.lengths = [documents.lengths[n] for n in order]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lengths)

    def document(self, number: int) -> Document:
        """One document, by a forward pass of its own."""
        return self.documents([number])[0]

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int32 `[T]` and loss mask uint8 `[T]` of one document, without the target."""
        row = self._documents.document(self._order[number])
        return row.input_ids.int(), row.loss_mask.to(torch.uint8)

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Several documents in as few forward passes as `batch_tokens` allows."""
        found: dict[int, Document] = {}
        for batch in self._passes(numbers):
            rows = [self._documents.document(self._order[n]) for n in batch]
            states = target_states(self._target, [row.input_ids for row in rows], self._taps)
            for n, row, (features, last_hidden) in zip(batch, rows, states, strict=True):
                mask = row.loss_mask.to(torch.uint8)
                labels = label_rows(mask)
                hidden = last_hidden[labels.to(last_hidden.device)]
                found[n] = Document(
                    input_ids=row.input_ids.int(),
                    loss_mask=mask,
                    features=decode(*encode(features, self.dtype, len(self._taps))),
                    last_hidden=decode(*encode(hidden, self.dtype, 1)),
                    label_rows=labels,
                )
        return [found[n] for n in numbers]

    def _passes(self, numbers: Sequence[int]) -> list[list[int]]:
        """Documents of each forward pass."""
        shortest_first = sorted(numbers, key=lambda n: self.lengths[n])
        passes = list(batches(shortest_first, self.lengths, self._batch_tokens))
        if self._target.sharded:  # who has fewer passes than another process repeats its shortest
            passes += passes[:1] * (max(ranks.gather(len(passes))) - len(passes))
        return passes

    @property
    def ahead(self) -> bool:
        """Whether a thread may ask while training goes on.

        Not where processes speak with each other in both: their messages could cross.
        """
        return not self._target.sharded

    def verify(self) -> None:
        """Nothing is stored; the rollouts' checksums were compared when they were opened."""
