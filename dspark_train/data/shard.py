"""One shard of a feature store: a safetensors file of concatenated documents, memory-mapped.

Tensors of a shard with N documents and T tokens in total:

| name | dtype | shape | |
|---|---|---|---|
| `input_ids` | int32 | [T] | |
| `loss_mask` | uint8 | [T] | 1 = supervised token |
| `features` | stored dtype | [T, M·D] | outputs of the tapped layers |
| `last_hidden` | stored dtype | [T', D] | after the final norm, rows p with loss_mask[p + 1] = 1 |
| `features_scales` | float32 | [T, M] | only in eight bits, see `encoding.py` |
| `last_hidden_scales` | float32 | [T', 1] | only in eight bits |
| `row_splits` | int64 | [N + 1] | document n has tokens row_splits[n] … row_splits[n + 1] |
| `hidden_splits` | int64 | [N + 1] | the same for the rows of `last_hidden` |

The metadata's `dspark` entry is JSON: `identities`, one string for each document.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from dspark_train.data.encoding import LARGEST, STORED, decode

DTYPES = {
    "I32": torch.int32,
    "U8": torch.uint8,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
FIXED = {
    "input_ids": torch.int32,
    "loss_mask": torch.uint8,
    "row_splits": torch.int64,
    "hidden_splits": torch.int64,
}
PREFIX = "features-"
METADATA = "dspark"
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Document:
    """One document of a store; the tensors are views of the file, unless they had to be decoded.

    Attributes:
        input_ids: [T] int32.
        loss_mask: [T] uint8, 1 = supervised token.
        features: [T, M·D] in the stored dtype, bfloat16 where that is eight bits.
        last_hidden: [T', D], the same.
        label_rows: [T'] int64, the position in the document of each row of `last_hidden`.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last_hidden: torch.Tensor
    label_rows: torch.Tensor


def label_rows(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions [T'] whose last hidden state predicts a supervised token, of a mask [T]."""
    return loss_mask[1:].nonzero().squeeze(-1)


def write_shard(path: Path, identities: Sequence[str], tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file of the tensors above; the same tensors give the same bytes."""
    # One entry only: the library does not keep the order of several.
    save_file(tensors, path, metadata={METADATA: json.dumps({"identities": list(identities)})})


class Shard:
    """A shard opened for reading. Opening reads the header and the splits, nothing else.

    Attributes:
        identities: of the documents, in order.
        lengths: tokens of each document.
        num_bytes: size of the file.
        dtype: of `features` and `last_hidden`.
        widths: their columns, M·D and D.
        num_tokens, num_label_rows: rows of `features` and of `last_hidden`.
    """

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            ValueError: if it is truncated, damaged or not a shard; the message names it.
        """
        self.path = path
        self.num_bytes = path.stat().st_size if path.is_file() else 0
        try:
            self._tensors, metadata = _map(path, self.num_bytes)
            self.identities: list[str] = json.loads(metadata[METADATA])["identities"]
            self._row_splits = self._tensors["row_splits"].tolist()
            self._hidden_splits = self._tensors["hidden_splits"].tolist()
            self._check()
        except (ValueError, KeyError, TypeError, OSError, RuntimeError, struct.error) as error:
            raise ValueError(
                f"{path} is damaged, truncated or not a feature shard ({error}); run the capture "
                "stage again with force=[capture]"
            ) from error
        self.dtype = self._tensors["features"].dtype
        self.widths = (self._tensors["features"].shape[1], self._tensors["last_hidden"].shape[1])
        self.num_tokens, self.num_label_rows = self._row_splits[-1], self._hidden_splits[-1]
        self.lengths = [end - start for start, end in pairwise(self._row_splits)]

    def __len__(self) -> int:
        return len(self.identities)

    def __reduce__(self) -> tuple[type["Shard"], tuple[Path]]:
        # A process that gets a pickled shard maps the file itself, instead of receiving its bytes.
        return Shard, (self.path,)

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the token ids and the loss mask of one document."""
        rows = slice(*self._row_splits[index : index + 2])
        return self._tensors["input_ids"][rows], self._tensors["loss_mask"][rows]

    def document(self, index: int) -> Document:
        """Views of one document's part of the file; nothing is read until they are used.

        Raises:
            ValueError: if its mask contradicts its rows of last hidden states.
        """
        rows = slice(*self._row_splits[index : index + 2])
        hidden = slice(*self._hidden_splits[index : index + 2])
        mask = self._tensors["loss_mask"][rows]
        labels = label_rows(mask)
        if len(labels) != hidden.stop - hidden.start:
            raise ValueError(
                f"{self.path} is damaged: document {self.identities[index]} has {len(labels)} "
                f"labels but {hidden.stop - hidden.start} last hidden states; run the capture "
                "stage again with force=[capture]"
            )
        return Document(
            input_ids=self._tensors["input_ids"][rows],
            loss_mask=mask,
            features=self._decoded("features", rows),
            last_hidden=self._decoded("last_hidden", hidden),
            label_rows=labels,
        )

    def _decoded(self, name: str, rows: slice) -> torch.Tensor:
        scales = self._tensors.get(f"{name}_scales")
        return decode(self._tensors[name][rows], None if scales is None else scales[rows])

    def check_finite(self) -> None:
        """Read everything and look for values that are not finite.

        Raises:
            ValueError: naming the file, the document and the tensor.
        """
        for index, identity in enumerate(self.identities):
            document = self.document(index)
            for name in ("features", "last_hidden"):
                if not getattr(document, name).isfinite().all():
                    raise ValueError(f"{self.path}: {name} of document {identity} has NaN or Inf")

    def _check(self) -> None:
        tensors = self._tensors
        tokens, count = len(tensors["input_ids"]), len(self.identities)
        for name, dtype in FIXED.items():
            if tensors[name].dtype != dtype or tensors[name].dim() != 1:
                raise ValueError(f"{name} is not a vector of {dtype}")
        if tensors["features"].dtype not in STORED.values():
            raise ValueError(f"features are stored as {tensors['features'].dtype}")
        if len(tensors["loss_mask"]) != tokens or len(tensors["features"]) != tokens:
            raise ValueError("input_ids, loss_mask and features differ in length")
        for name in ("features", "last_hidden"):
            scaled, scales = tensors[name].dtype in LARGEST, tensors.get(f"{name}_scales")
            if scaled and (scales is None or len(scales) != len(tensors[name])):
                raise ValueError(f"{name} have no scale for every row")
        rows = len(tensors["last_hidden"])
        for splits, total in ((self._row_splits, tokens), (self._hidden_splits, rows)):
            ordered = splits == sorted(splits) and splits[:1] == [0] and splits[-1] == total
            if not ordered or len(splits) != count + 1:
                raise ValueError(f"the splits do not divide {total} rows among {count} documents")


def _map(path: Path, num_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
        if header_bytes > num_bytes:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(header_bytes))
    metadata = header.pop("__metadata__")
    data = LENGTH_BYTES + header_bytes
    expected = data + max(entry["data_offsets"][1] for entry in header.values())
    if expected != num_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes instead of {expected:,}")
    # A private mapping: pages are read when touched, and writes never reach the file.
    mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = mapped[data + start : data + end]
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors, metadata
