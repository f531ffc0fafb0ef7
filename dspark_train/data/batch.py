"""From documents to training batches: packed rows, isolated documents, seeded anchors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from dspark_train.blocks import sample_anchors
from dspark_train.data.store import Document


@dataclass(frozen=True)
class Batch:
    """Rows of one or more whole documents each, padded to the longest row.

    Attributes:
        input_ids: `[B, S]`.
        positions: `[B, S]` position inside the document.
        loss_mask: `[B, S]` bool, supervised tokens.
        features: `[B, S, M·D]`.
        anchors: `[B, A]` anchor positions in the row.
        starts, ends: `[B, A]` the anchor's document in the row, end exclusive.
        keep: `[B, A]` bool, false where the row has fewer than A anchors.
        last_hidden: `[R, D]` the target's last hidden states that a label may need.
        hidden_rows: `[B, S]` row of `last_hidden` for a position, 0 where it has none.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    anchors: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    keep: torch.Tensor
    last_hidden: torch.Tensor
    hidden_rows: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Group documents into rows of at most `row_tokens` tokens, first fit, order kept inside a row.

    A longer document gets a row of its own; with 0 every document does.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for document, length in enumerate(lengths):
        row = next((i for i, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([document])
            room.append(row_tokens - length)
        else:
            rows[row].append(document)
            room[row] -= length
    return rows


def collate(
    documents: Sequence[Document],
    numbers: Sequence[int],
    *,
    anchors: int,
    row_tokens: int,
    seed: int,
    epoch: int,
) -> Batch:
    """Pack documents into a batch and draw their anchors.

    Args:
        documents: what the feature store returned.
        numbers: their identities in the store; with `seed` and `epoch` they decide the anchors.
        anchors: blocks drawn per document, at most.
        row_tokens: token budget of a row, see `pack_rows`.
    """
    rows = pack_rows([len(d.input_ids) for d in documents], row_tokens)
    B, S = len(rows), max(sum(len(documents[i].input_ids) for i in row) for row in rows)
    first = documents[0]
    input_ids = torch.zeros(B, S, dtype=torch.int64)
    positions = torch.zeros(B, S, dtype=torch.int64)
    hidden_rows = torch.zeros(B, S, dtype=torch.int64)
    loss_mask = torch.zeros(B, S, dtype=torch.bool)
    features = first.features.new_zeros(B, S, first.features.shape[1])
    drawn: list[list[tuple[int, int, int]]] = []
    hidden: list[torch.Tensor] = []
    stored = 0
    for b, row in enumerate(rows):
        start, blocks = 0, []
        for i in row:
            document = documents[i]
            length = len(document.input_ids)
            end = start + length
            mask = document.loss_mask.bool()
            input_ids[b, start:end] = document.input_ids
            positions[b, start:end] = torch.arange(length)
            loss_mask[b, start:end] = mask
            features[b, start:end] = document.features
            # the store keeps last hidden states only where the next token is supervised
            needed = mask[1:]
            hidden_rows[b, start : end - 1] = (stored + needed.cumsum(0) - 1) * needed
            hidden.append(document.last_hidden)
            stored += len(document.last_hidden)
            chosen = sample_anchors(mask, anchors, seed=seed, epoch=epoch, document=numbers[i])
            blocks += [(start + anchor, start, end) for anchor in chosen.tolist()]
            start = end
        drawn.append(blocks)
    A = max(1, *(len(blocks) for blocks in drawn))  # an empty block rather than empty tensors
    spans = torch.zeros(B, A, 3, dtype=torch.int64)
    keep = torch.zeros(B, A, dtype=torch.bool)
    for b, blocks in enumerate(drawn):
        if blocks:
            spans[b, : len(blocks)] = torch.tensor(blocks)
            keep[b, : len(blocks)] = True
    at, starts, ends = spans.unbind(-1)
    return Batch(
        input_ids=input_ids,
        positions=positions,
        loss_mask=loss_mask,
        features=features,
        anchors=at,
        starts=starts,
        ends=ends,
        keep=keep,
        last_hidden=torch.cat(hidden),
        hidden_rows=hidden_rows,
    )
