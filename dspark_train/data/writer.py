"""Writing a feature store: documents in, shards of a bounded size out."""

import torch

from dspark_train.artifacts import ArtifactWriter
from dspark_train.data.shard import PREFIX, STORED, Document, Shard, label_rows, write_shard


class FeatureWriter:
    """Writes documents in order to shards of a bounded size.

    Which documents share a shard depends on the documents alone. So a writer that continues
    interrupted work, given the documents that follow the `done` ones, ends with the same files.

    Attributes:
        done: documents in the shards which an interrupted run has finished. The caller goes on
            with the document after them.
    """

    def __init__(
        self, writer: ArtifactWriter, *, dtype: str = "bfloat16", shard_bytes: int = 512 * 2**20
    ) -> None:
        """Find the finished shards and get ready for the document after them.

        Args:
            writer: of the artifact that the shards belong to.
            dtype: of the stored features and last hidden states.
            shard_bytes: a shard is closed once it holds so many bytes. Memory in use while it is
                written is two to three times that.

        Raises:
            ValueError: for an unknown dtype or shard size, or a finished shard that is damaged.
        """
        if dtype not in STORED:
            raise ValueError(f"capture.dtype={dtype!r}; expected one of {list(STORED)}")
        if shard_bytes < 1:
            raise ValueError(f"a shard of {shard_bytes} bytes; expected at least 1")
        self._writer = writer
        self._dtype = STORED[dtype]
        self._shard_bytes = shard_bytes
        self._counts = dict.fromkeys(("documents", "tokens", "label_rows", "shards", "bytes"), 0)
        self._identities: list[str] = []
        self._documents: list[Document] = []
        self._open_bytes = 0
        while writer.has(self._name()):
            self._count(Shard(writer.path(self._name())))
        self.done = self._counts["documents"]

    def add(
        self,
        identity: str,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        features: torch.Tensor,
        last_hidden: torch.Tensor,
    ) -> None:
        """Append a document; of `last_hidden` only the rows that a label needs are kept.

        Args:
            identity: of the conversation; several documents may share it.
            input_ids: [T] integers.
            loss_mask: [T], nonzero = supervised.
            features: [T, M·D].
            last_hidden: [T, D], all positions.

        Raises:
            ValueError: if the lengths differ, or a value that would be stored is NaN or infinite;
                the message names document and position.
        """
        lengths = [len(t) for t in (input_ids, loss_mask, features, last_hidden)]
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(
                f"document {identity}: input_ids, loss_mask, features and last_hidden must have "
                f"one row a token, got {lengths}"
            )
        mask = loss_mask.ne(0).to("cpu", torch.uint8)
        rows = label_rows(mask)
        document = Document(
            # copies: the caller's tensors may be views of a whole padded batch
            input_ids=input_ids.to("cpu", torch.int32, copy=True),
            loss_mask=mask,
            features=features.detach().to("cpu", self._dtype, copy=True),
            last_hidden=last_hidden.detach()[rows.to(last_hidden.device)].to("cpu", self._dtype),
            label_rows=rows,
        )
        positions = torch.arange(len(mask))
        _refuse_not_finite(identity, "features", document.features, positions)
        _refuse_not_finite(identity, "last_hidden", document.last_hidden, rows)
        self._identities.append(identity)
        self._documents.append(document)
        stored = (document.input_ids, mask, document.features, document.last_hidden)
        self._open_bytes += sum(tensor.nbytes for tensor in stored)
        if self._open_bytes >= self._shard_bytes:
            self._close_shard()

    def close(self) -> dict[str, int]:
        """Write the last shard.

        Returns:
            Counts over the whole store: documents, tokens, label_rows, shards, bytes.
        """
        if self._documents:
            self._close_shard()
        return dict(self._counts)

    def _name(self) -> str:
        return f"{PREFIX}{self._counts['shards']:05d}.safetensors"

    def _close_shard(self) -> None:
        name = self._name()
        self._writer.write(name, lambda path: write_shard(path, self._identities, self._documents))
        self._identities, self._documents, self._open_bytes = [], [], 0
        self._count(Shard(self._writer.path(name)))

    def _count(self, shard: Shard) -> None:
        self._counts["documents"] += len(shard)
        self._counts["tokens"] += shard.num_tokens
        self._counts["label_rows"] += shard.num_label_rows
        self._counts["shards"] += 1
        self._counts["bytes"] += shard.num_bytes


def _refuse_not_finite(
    identity: str, name: str, values: torch.Tensor, positions: torch.Tensor
) -> None:
    finite = values.isfinite()
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"document {identity}: {name} at position {positions[row]}, column {column} is "
            f"{values[row, column]}; the target overflows in this dtype, try target.dtype=float32"
        )
