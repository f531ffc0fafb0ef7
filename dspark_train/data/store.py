"""The feature store: what the target computed for every document, written once, read by mmap."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.data.shard import PREFIX, Document, Shard

__all__ = ["Document", "FeatureStore"]


class FeatureStore:
    """The documents of a finished capture, read by memory map.

    Attributes:
        directory: of the artifact.
        identities: of the documents' conversations, in order.
        lengths: tokens of each document.
        dtype: of the stored features and last hidden states.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Open all shards; only headers and splits are read.

        Raises:
            ValueError: if a shard is damaged or unlike the others, or if there is none.
        """
        self._artifact = artifact
        self.directory: Path = artifact.directory
        names = [name for name in artifact.names() if name.startswith(PREFIX)]
        if not names:
            raise ValueError(f"{self.directory} has no feature shards; run the capture stage first")
        self._shards = [Shard(self.directory / name) for name in names]
        first = self._shards[0]
        for shard in self._shards:
            if (shard.dtype, shard.widths) != (first.dtype, first.widths):
                raise ValueError(
                    f"{shard.path} holds {shard.widths} columns of {shard.dtype}, but {first.path} "
                    f"{first.widths} of {first.dtype}; run the capture stage again with "
                    "force=[capture]"
                )
        self.dtype = first.dtype
        self.identities = [identity for shard in self._shards for identity in shard.identities]
        self.lengths = [length for shard in self._shards for length in shard.lengths]
        self._ends = list(accumulate(len(shard) for shard in self._shards))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lengths)

    def document(self, number: int) -> Document:
        """Views of one document; the disk is read when they are used.

        Raises:
            ValueError: if its mask contradicts its rows of last hidden states.
            IndexError: if there is no such document.
        """
        shard, index = self._place(number)
        return shard.document(index)

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int32 `[T]` and loss mask uint8 `[T]` of one document."""
        shard, index = self._place(number)
        return shard.tokens(index)

    def shard_of(self, number: int) -> Path:
        """The file that holds a document."""
        return self._place(number)[0].path

    def _place(self, number: int) -> tuple[Shard, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)} in {self.directory}")
        shard = bisect_right(self._ends, number)
        return self._shards[shard], number - self._ends[shard] + len(self._shards[shard])

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Several documents, as `document` gives them."""
        return [self.document(number) for number in numbers]

    def verify(self) -> None:
        """Read every byte: compare the shards with their checksums and look for NaN and Inf.

        Raises:
            ValueError: naming the first file that is not as it was written.
        """
        for shard in self._shards:
            self._artifact.file(shard.path.name)
        self.check_finite()

    def check_finite(self) -> None:
        """Read every byte and look for NaN and Inf.

        Raises:
            ValueError: naming the file, the document and the tensor.
        """
        for shard in self._shards:
            shard.check_finite()
