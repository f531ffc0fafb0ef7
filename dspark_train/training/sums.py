"""What is watched, as sums that add up over micro-batches and processes.

Rates are made of sums at the end, never averaged: a process with one supervised slot counts as one
slot. A whole step is one vector, so that processes add theirs in a single exchange.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from dspark_train import ranks
from dspark_train.objective import LossTerms

SCALARS = ("numerator", "weight", "ce", "tv", "confidence", "expected_length", "blocks")
SLOTS = ("acceptance", "correct", "confidence_error", "supervised")
# of confidence, for the area under the curve
BINS = 200


@dataclass
class Sums:
    """Sums over everything that was added; `proposals` per block."""

    proposals: int
    device: torch.device
    vector: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.vector = torch.zeros(self._size, dtype=torch.float64, device=self.device)

    @cached_property
    def _size(self) -> int:
        return len(SCALARS) + self.proposals * (len(SLOTS) + 1 + 2 * BINS)

    def add(self, terms: LossTerms) -> None:
        """Add a micro-batch."""
        parts = [getattr(terms, name).detach()[None] for name in SCALARS]
        parts += [getattr(terms, name) for name in SLOTS]
        parts.append(label_entropy(terms.overlaps).sum(0))
        parts.append(self._histogram(terms).flatten())
        self.vector += torch.cat([part.to(self.vector) for part in parts])

    def _histogram(self, terms: LossTerms) -> torch.Tensor:
        """`[2, P, BINS]` accepted and rejected mass by confidence."""
        counts = torch.zeros(2, self.proposals, BINS, dtype=torch.float64, device=self.device)
        if terms.confidences is not None:
            bins = (terms.confidences * BINS).long().clamp(0, BINS - 1).T
            taken = terms.overlaps.to(counts)
            lost = terms.supervised_slots.to(counts) - taken
            counts[0].scatter_add_(1, bins, taken.T)
            counts[1].scatter_add_(1, bins, lost.T)
        return counts

    def exchange(self, *flags: bool) -> list[bool]:
        """Add up over all processes; returns which flags were raised by any of them."""
        if ranks.world_size() > 1:
            raised = torch.tensor(flags, dtype=torch.float64, device=self.device)
            everything = torch.cat((self.vector, raised))
            dist.all_reduce(everything)
            self.vector, raised = everything[: self._size], everything[self._size :]
            return (raised > 0).tolist()
        return list(flags)

    def metrics(self, stage: str, *, curve: bool = False) -> dict[str, float]:
        """What the sums say, named `stage/…`; numbers without anything to average are left out.

        `loss`, its terms, expected `tau`, and per proposal index the rate of acceptance, of greedy
        agreement, and the confidence's error; `label_entropy` is the least BCE that a confidence
        could reach. With `curve` also the area under the curve of accepted against rejected.
        """
        values = self.vector.tolist()
        scalars = dict(zip(SCALARS, values, strict=False))
        rows = torch.tensor(values[len(SCALARS) :]).split(self.proposals)
        slots = dict(zip((*SLOTS, "entropy"), (row.tolist() for row in rows), strict=False))
        found = {}
        if scalars["weight"] > 0:
            for name in ("ce", "tv", "confidence"):
                found[name] = scalars[name] / scalars["weight"]
            found["loss"] = scalars["numerator"] / scalars["weight"]
        if scalars["blocks"] > 0:
            found["tau"] = scalars["expected_length"] / scalars["blocks"]
        counts = slots["supervised"]
        histogram = self.vector[len(SCALARS) + self.proposals * (len(SLOTS) + 1) :]
        taken, lost = histogram.view(2, self.proposals, BINS).cpu()
        confident = bool(taken.sum() + lost.sum() > 0)
        for k, count in enumerate(counts):
            if count > 0:
                found[f"acceptance_{k}"] = slots["acceptance"][k] / count
                found[f"agreement_{k}"] = slots["correct"][k] / count
                if confident:
                    found[f"confidence_error_{k}"] = slots["confidence_error"][k] / count
                if confident and curve:
                    found[f"confidence_auc_{k}"] = area_under_curve(taken[k], lost[k])
        if sum(counts) > 0:
            found["label_entropy"] = sum(slots["entropy"]) / sum(counts)
        return {f"{stage}/{name}": value for name, value in found.items() if value == value}

    @property
    def weight(self) -> float:
        return self.vector[SCALARS.index("weight")].item()

    @property
    def numerator(self) -> float:
        return self.vector[SCALARS.index("numerator")].item()

    @property
    def blocks(self) -> float:
        return self.vector[SCALARS.index("blocks")].item()

    @property
    def supervised(self) -> float:
        start = len(SCALARS) + SLOTS.index("supervised") * self.proposals
        return self.vector[start : start + self.proposals].sum().item()


def label_entropy(accepted: torch.Tensor) -> torch.Tensor:
    """Entropy `[...]` in nats of a coin that says accepted with these probabilities."""
    accepted = accepted.clamp(0.0, 1.0)
    return torch.special.entr(accepted) + torch.special.entr(1.0 - accepted)


def area_under_curve(taken: torch.Tensor, lost: torch.Tensor) -> float:
    """How often what was accepted had the higher confidence; NaN where nothing can be compared.

    Args:
        taken, lost: accepted and rejected mass `[bins]` by rising confidence; ties count half.
    """
    below = lost.cumsum(0) - lost
    return ((taken * (below + 0.5 * lost)).sum() / (taken.sum() * lost.sum())).item()
