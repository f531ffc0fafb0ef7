"""Counts of decoding, per request or summed over many."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """Seconds of a round by part; for a request of a batch, its equal share.

    Attributes:
        draft: the drafter's passes, and reading the target's features into its cache.
        walk: the sequential head from slot to slot, with the draws of its drafts.
        verify: the target's pass and its LM head.
        sampling: the verdict on the drafts, and the draw of the token after them.
        bookkeeping: schedule, proposals, tokens and ends of requests.
    """

    draft: float = 0.0
    walk: float = 0.0
    verify: float = 0.0
    sampling: float = 0.0
    bookkeeping: float = 0.0


@dataclass(frozen=True)
class Round:
    """One round: propose, one target pass, verdict.

    Attributes:
        proposed: drafts that entered the target pass.
        accepted: drafts that were accepted and kept (none after an EOS or a stop).
        judged: drafts whose verdict counts: the accepted ones and the rejected one. Behind a
            rejection or an end of the text nothing is known.
        committed: tokens added, the residual or bonus token included.
        confidence: logits of the confidence head for the drafts, or None.
        seconds: where its time went.
        overlap: `1 − ½‖draft − target‖₁` for the drafts, of traced requests; else None.
    """

    proposed: int
    accepted: int
    judged: int
    committed: int
    confidence: list[float] | None
    seconds: Seconds = field(default_factory=Seconds)
    overlap: list[float] | None = None

    @property
    def known(self) -> int:
        """Leading drafts of which it is known whether the prefix up to them stands.

        After a rejection that is all of them; where the text ended inside the block, nothing is
        known of what came after the end.
        """
        return self.proposed if self.judged > self.accepted else self.accepted


@dataclass
class DecodingStats:
    """Sums over rounds. The first token of a request comes from its prefill and from no round.

    Attributes:
        requests, rounds: how many.
        tokens: new tokens emitted, an EOS included.
        committed: those of them that rounds committed.
        proposed: drafts that entered a target pass.
        tried, passed: per slot, rounds in which the slot was judged, and accepted.
        histogram: entry n counts the rounds that accepted n drafts.
        seconds: those of the rounds by part, and prefill.
    """

    requests: int = 0
    rounds: int = 0
    tokens: int = 0
    committed: int = 0
    proposed: int = 0
    tried: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: {**Seconds()._asdict(), "prefill": 0.0}
    )

    def add(self, round_: Round) -> None:
        """Count one round."""
        self.rounds += 1
        self.tokens += round_.committed
        self.committed += round_.committed
        self.proposed += round_.proposed
        _add(self.tried, [1] * round_.judged)
        _add(self.passed, [1] * round_.accepted + [0] * (round_.judged - round_.accepted))
        _add(self.histogram, [0] * round_.accepted + [1])
        for part, seconds in round_.seconds._asdict().items():
            self.seconds[part] += seconds

    def merge(self, other: "DecodingStats") -> None:
        """Add the counts of `other`."""
        for name in ("requests", "rounds", "tokens", "committed", "proposed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tried", "passed", "histogram"):
            _add(getattr(self, name), getattr(other, name))
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds

    @property
    def tau(self) -> float:
        """Mean tokens committed per round (the papers' τ)."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_per_slot(self) -> list[float]:
        """Acceptance rate of each slot, given that the earlier ones passed."""
        return [p / t for p, t in zip(self.passed, self.tried, strict=True)]

    @property
    def verified_per_committed(self) -> float:
        """Positions in target passes (anchors included) per committed token; plain decoding: 1."""
        return (self.proposed + self.rounds) / self.committed if self.committed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, prefill included."""
        total = sum(self.seconds.values())
        return self.tokens / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates for a report."""
        return {
            "requests": self.requests,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_per_slot": self.acceptance_per_slot,
            "accepted_histogram": list(self.histogram),
            "verified_per_committed": self.verified_per_committed,
            "seconds": dict(self.seconds),
        }


def _add(sums: list[int], counts: list[int]) -> None:
    sums.extend([0] * (len(counts) - len(sums)))
    for i, count in enumerate(counts):
        sums[i] += count
