"""Responses as documents to learn from: token ids, and which of them the target generated.

A stored row is one answered turn: `prompt` (ids of everything before it), `response` (ids as
generated, the EOS included). The turns of a conversation follow each other; where a turn's prompt
begins with the one before, its answer included, they are one document with several supervised
parts. Otherwise (a template that rewrites history) each turn is a document of its own.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_train.artifacts import Artifact

Row = dict[str, Any]


@dataclass(frozen=True)
class RolloutDocument:
    """Token ids int64 `[T]` and loss mask bool `[T]` of one document."""

    identity: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


class RolloutDocuments:
    """Documents of a finished rollout, by number; held on disk, only their sizes in memory.

    Attributes:
        directory: of the rollout.
        identities: of the documents' conversations.
        lengths, labels: tokens, and supervised tokens, of each document.
        read, dropped: stored rows, and why some are in no document; `kept` is the difference.
    """

    def __init__(
        self, rollout: Artifact, *, max_length: int, drop_degenerate: bool = False
    ) -> None:
        """Read all rows once.

        Args:
            rollout: the artifact.
            max_length: longer rows are dropped ("too_long"), never cut.
            drop_degenerate: drop answers that ran into a loop ("degenerate").

        Raises:
            ValueError: a file is damaged, or there is nothing to learn from.
        """
        self.directory = rollout.directory
        self.files = [rollout.file(name) for name in rollout.facts["shards"]]
        self.identities: list[str] = []
        self.lengths, self.labels = array("q"), array("q")
        self._places = array("q")  # per document: file, offset of its first row, number of rows
        self.read, self.dropped = 0, Counter()
        for number, path in enumerate(self.files):
            group: list[tuple[int, Row]] = []
            for offset, row in _rows(path):
                self.read += 1
                if reason := unusable(row, max_length, drop_degenerate):
                    self.dropped[reason] += 1
                if group and (reason or not _continues(group[-1][1], row)):
                    self._append(number, group)
                    group = []
                if not reason:
                    group.append((offset, row))
            if group:
                self._append(number, group)
        if not self.identities:
            raise ValueError(
                f"{self.directory} has no response to learn from: {dict(self.dropped)} of "
                f"{self.read} (short: fewer than 2 tokens; too_long: more than "
                f"capture.max_length={max_length})"
            )

    def __len__(self) -> int:
        return len(self.identities)

    @property
    def kept(self) -> int:
        """Rows that are in a document."""
        return self.read - sum(self.dropped.values())

    def document(self, number: int) -> RolloutDocument:
        """One document, read from disk."""
        file, offset, count = self._places[3 * number : 3 * number + 3]
        with self.files[file].open("rb") as lines:
            lines.seek(offset)
            rows = [json.loads(lines.readline()) for _ in range(count)]
        last = rows[-1]
        ids = torch.tensor(last["prompt"] + last["response"])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for row in rows:
            start = len(row["prompt"])
            mask[start : start + len(row["response"])] = True
        return RolloutDocument(last["id"], ids, mask)

    def _append(self, file: int, group: list[tuple[int, Row]]) -> None:
        last = group[-1][1]
        self.identities.append(last["id"])
        self.lengths.append(len(last["prompt"]) + len(last["response"]))
        self.labels.append(sum(len(row["response"]) for _, row in group))
        self._places.extend((file, group[0][0], len(group)))


def unusable(row: Row, max_length: int, drop_degenerate: bool) -> str | None:
    """Why a row is not learnt from, or None."""
    if row.get("origin") == "differs":
        return "no_round_trip"  # text that no longer gives the ids it was generated from
    if not row["prompt"]:
        return "no_prompt"  # a mask of ones all over
    if len(row["response"]) < 2:
        return "short"  # an anchor needs a supervised successor: one token alone teaches nothing
    if len(row["prompt"]) + len(row["response"]) > max_length:
        return "too_long"
    return "degenerate" if drop_degenerate and row.get("degenerate") else None


def _continues(before: Row, row: Row) -> bool:
    """Whether `row` is a later turn of the document that ends with `before`."""
    if (before["id"], before["sample"]) != (row["id"], row["sample"]):
        return False
    whole = before["prompt"] + before["response"]
    return row["prompt"][: len(whole)] == whole


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    offset = 0
    with path.open("rb") as lines:
        for line in lines:
            yield offset, json.loads(line)
            offset += len(line)
