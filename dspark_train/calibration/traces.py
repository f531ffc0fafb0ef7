"""Traces of decoding rounds: what the confidence head said, and what became of the drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class TracedRound:
    """One round with at least one verified draft.

    Attributes:
        logits, overlap: one number per verified draft: confidence logit, and `1 − ½‖draft −
            target‖₁`, the exact chance that the draft is accepted once those before it were.
        accepted: drafts that stand.
        known: leading drafts of which the round tells whether the prefix up to them stands.
        context: tokens before the anchor, so draft k is for position `context + 1 + k`.
        conversation, domain: which prompt it belongs to, and what kind that is.
        temperature: of the sampler.
    """

    logits: Sequence[float]
    overlap: Sequence[float]
    accepted: int
    known: int
    context: int
    conversation: int
    domain: str
    temperature: float


@dataclass(frozen=True)
class Traces:
    """N rounds of at most P drafts, as columns.

    Attributes:
        logits, overlap: float32 `[N, P]`, 0 and NaN behind the drafts that were verified.
        proposed, accepted, known, context, conversation, domain: int64 `[N]`; `domain` counts in
            `domains`.
        temperature: float32 `[N]`.
        domains: names.
    """

    logits: torch.Tensor
    overlap: torch.Tensor
    proposed: torch.Tensor
    accepted: torch.Tensor
    known: torch.Tensor
    context: torch.Tensor
    conversation: torch.Tensor
    domain: torch.Tensor
    temperature: torch.Tensor
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.accepted)

    @classmethod
    def collect(cls, rounds: Sequence[TracedRound], proposals: int) -> "Traces":
        """Columns of the rounds, P = `proposals`."""
        domains = sorted({r.domain for r in rounds})

        def padded(rows: list[Sequence[float]], filler: float) -> torch.Tensor:
            full = [[*row, *[filler] * (proposals - len(row))] for row in rows]
            return torch.tensor(full, dtype=torch.float32).view(-1, proposals)

        def whole(name: str) -> torch.Tensor:
            return torch.tensor([getattr(r, name) for r in rounds], dtype=torch.int64)

        return cls(
            logits=padded([r.logits for r in rounds], 0.0),
            overlap=padded([r.overlap for r in rounds], float("nan")),
            proposed=torch.tensor([len(r.logits) for r in rounds], dtype=torch.int64),
            accepted=whole("accepted"),
            known=whole("known"),
            context=whole("context"),
            conversation=whole("conversation"),
            domain=torch.tensor([domains.index(r.domain) for r in rounds], dtype=torch.int64),
            temperature=torch.tensor([r.temperature for r in rounds], dtype=torch.float32),
            domains=tuple(domains),
        )

    def where(self, rows: torch.Tensor) -> "Traces":
        """The rounds that a mask `[N]` selects."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "domains"}
        return Traces(**columns, domains=self.domains)

    def shifted(self, by: torch.Tensor) -> "Traces":
        """With so much `[P]` added to the confidence logits of every slot."""
        return replace(self, logits=self.logits + by.to(self.logits.dtype))

    def halves(self) -> tuple["Traces", "Traces"]:
        """Every other conversation, and the rest: rounds of one conversation stay together.

        Raises:
            ValueError: fewer than two conversations.
        """
        names = self.conversation.unique()
        if len(names) < 2:
            raise ValueError(
                f"traces of {len(names)} conversations cannot be halved into some to fit on and "
                "others to report on: decode more prompts"
            )
        first = torch.isin(self.conversation, names[::2])
        return self.where(first), self.where(~first)

    def save(self, path: Path) -> None:
        """Write as safetensors."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "domains"}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path, metadata={"domains": "\n".join(self.domains)})

    @classmethod
    def load(cls, path: Path) -> "Traces":
        """Read what `save` wrote.

        Raises:
            ValueError: another file; the message names it.
        """
        try:
            with safe_open(path, "pt") as file:
                domains = tuple((file.metadata() or {})["domains"].split("\n"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(**tensors, domains=domains)
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no traces ({error}): expected those that the stage calibrate writes"
            ) from error
