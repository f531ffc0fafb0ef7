"""Writing a feature store: documents in, planned shards out, on a thread of its own."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from dspark_train.artifacts import ArtifactWriter
from dspark_train.data.encoding import encode, tensors_of
from dspark_train.data.shard import PREFIX, label_rows, write_shard
from dspark_train.disk import check_space


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"{PREFIX}{number:05d}.safetensors"


class _OpenShard:
    """A shard that is being filled: its final tensors, allocated once."""

    def __init__(
        self, number: int, lengths: list[int], labels: list[int], dtype: str, taps: int
    ) -> None:
        self.number, self.lengths, self.labels = number, lengths, labels
        self.dtype, self.taps = dtype, taps
        self.identities: list[str] = []
        self.token = self.label = 0
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def full(self) -> bool:
        return len(self.identities) == len(self.lengths)

    def allocate(self, width: int, hidden: int) -> None:
        tokens, rows = sum(self.lengths), sum(self.labels)
        self.tensors = {
            "input_ids": torch.empty(tokens, dtype=torch.int32),
            "loss_mask": torch.empty(tokens, dtype=torch.uint8),
            "row_splits": torch.tensor([0, *self.lengths]).cumsum(0),
            "hidden_splits": torch.tensor([0, *self.labels]).cumsum(0),
            **dict(tensors_of(self.dtype, "features", tokens, width, self.taps)),
            **dict(tensors_of(self.dtype, "last_hidden", rows, hidden, 1)),
        }

    def put(self, name: str, start: int, values: torch.Tensor, groups: int) -> None:
        stored, scales = encode(values, self.dtype, groups)
        self.tensors[name][start : start + len(stored)] = stored
        if scales is not None:
            self.tensors[f"{name}_scales"][start : start + len(stored)] = scales

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class FeatureWriter:
    """Fills one shard while a thread writes the one before: two are in memory, never more.

    Use as a context manager; leaving it waits for what is being written.

    Args:
        writer: of the artifact that the shards belong to.
        dtype: as which numbers are stored, a key of `encoding.STORED`.
        taps: M, the number of tapped layers in a row of features.
    """

    def __init__(self, writer: ArtifactWriter, *, dtype: str, taps: int) -> None:
        self._writer, self._dtype, self._taps = writer, dtype, taps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shards")
        self._writing: Future[None] | None = None
        self._open: _OpenShard | None = None

    def __enter__(self) -> "FeatureWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._wait()

    def begin(self, number: int, lengths: list[int], labels: list[int]) -> None:
        """Begin shard `number` of documents with so many tokens and supervised labels each."""
        if self._open is not None:
            raise ValueError(f"shard {self._open.number} still waits for documents")
        self._open = _OpenShard(number, lengths, labels, self._dtype, self._taps)

    def add(
        self,
        identity: str,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        features: torch.Tensor,
        last_hidden: torch.Tensor,
    ) -> None:
        """Append the shard's next document; with the last one the shard goes to the thread.

        Args:
            identity: of the conversation; several documents may share it.
            input_ids: [T] integers.
            loss_mask: [T], nonzero = supervised.
            features: [T, M·D], on any device.
            last_hidden: [T, D], all positions; the rows that a label needs are kept.

        Raises:
            ValueError: a document other than was planned, or a value that is NaN or infinite (the
                message names document and position); or the shard before could not be written.
        """
        shard = self._open
        assert shard is not None, "begin() comes first"
        place = len(shard.identities)
        mask = loss_mask.ne(0).to("cpu", torch.uint8)
        rows = label_rows(mask)
        given = [len(t) for t in (input_ids, loss_mask, features, last_hidden)] + [len(rows)]
        planned = [shard.lengths[place]] * 4 + [shard.labels[place]]
        if given != planned:
            raise ValueError(
                f"document {identity}: rows of input_ids, loss_mask, features and last_hidden, and "
                f"labels, are {given}; planned were {planned}"
            )
        hidden = last_hidden.detach()[rows.to(last_hidden.device)]
        _refuse_not_finite(identity, "features", features, torch.arange(len(mask)))
        _refuse_not_finite(identity, "last_hidden", hidden, rows)
        if not shard.tensors:
            shard.allocate(features.shape[1], hidden.shape[1])
        tokens = slice(shard.token, shard.token + len(mask))
        shard.tensors["input_ids"][tokens] = input_ids.to("cpu", torch.int32)
        shard.tensors["loss_mask"][tokens] = mask
        shard.put("features", shard.token, features.detach(), self._taps)
        shard.put("last_hidden", shard.label, hidden, 1)
        shard.token, shard.label = tokens.stop, shard.label + len(rows)
        shard.identities.append(identity)
        if shard.full:
            self._wait()  # the one before, so that only two are ever held
            self._open, self._writing = None, self._thread.submit(self._write, shard)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()  # raises what went wrong on the thread

    def _write(self, shard: _OpenShard) -> None:
        check_space(self._writer.directory, shard.nbytes, "the next shard")
        self._writer.write(
            shard_name(shard.number),
            lambda path: write_shard(path, shard.identities, shard.tensors),
        )


def _refuse_not_finite(
    identity: str, name: str, values: torch.Tensor, positions: torch.Tensor
) -> None:
    if not values.isfinite().all():
        row, column = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"document {identity}: {name} at position {positions[row]}, column {column} is "
            f"{values[row, column]}; the target overflows in this dtype, try target.dtype=float32"
        )
