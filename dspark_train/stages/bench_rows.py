"""What a bench measured, as rows of its report: speed, acceptance, where time went, by domain."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from dspark_train.decoding.stats import DecodingStats
from dspark_train.stages.bench_decoders import Answers, Decoder
from dspark_train.stages.bench_model import speed_model
from dspark_train.stages.divergence import first_divergence
from dspark_train.target import Target


@dataclass
class Unit:
    """One batch of prompts through one contestant.

    Attributes:
        prompts: places of the prompts.
        seconds: one time per round.
        outputs: new tokens of each prompt, in the first round.
        stats: of each prompt, all rounds together.
    """

    prompts: list[int]
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    stats: list[DecodingStats] = field(default_factory=list)

    def add(self, seconds: float, answers: Answers) -> None:
        """One more time of the same prompts."""
        self.seconds.append(seconds)
        if not self.outputs:
            self.outputs = [tokens for tokens, _ in answers]
            self.stats = [DecodingStats() for _ in answers]
        for sums, (_, stats) in zip(self.stats, answers, strict=True):
            sums.merge(stats)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / median(self.seconds)


@dataclass
class Row:
    """One contestant at one batch size under one sampler."""

    decoder: Decoder
    temperature: float
    batch: int
    units: list[Unit] = field(default_factory=list)

    @property
    def sampler(self) -> str:
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature}"

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds, the seconds of a batch the median of its rounds."""
        return speed(self.units)

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return sum(sum(unit.seconds) for unit in self.units)

    @property
    def stats(self) -> DecodingStats:
        return merged([stats for unit in self.units for stats in unit.stats])


def speed(units: list[Unit]) -> float:
    """Tokens per second of some batches together."""
    tokens = sum(len(output) for unit in units for output in unit.outputs)
    return tokens / sum(median(unit.seconds) for unit in units)


def merged(parts: list[DecodingStats]) -> DecodingStats:
    """The sum of statistics."""
    total = DecodingStats()
    for part in parts:
        total.merge(part)
    return total


def summarise(
    target: Target, rows: list[Row], prompts: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The report's rows, and greedy divergences that no near tie explains."""
    plain = {(row.batch, row.temperature): row for row in rows if row.decoder.name == "plain"}
    entries, unexplained = [], []
    for row in rows:
        base = plain[row.batch, row.temperature]
        entry = {**measured(row, base), "by": groups(row, base, prompts)}
        if row.temperature == 0:
            found = divergences(target, row, base, prompts)
            unexplained += [f"{row.decoder.name}: {one}" for one in found if not one.near_tie]
            entry |= {
                "greedy_identical": not found,
                "near_ties": sum(one.near_tie for one in found),
                "near_tie_cases": [asdict(one) for one in found],
            }
        entries.append(entry)
    return entries, unexplained


def measured(row: Row, plain: Row) -> dict[str, Any]:
    """Everything that is told of one row; rates are rounded."""
    stats, wall = row.stats, row.seconds
    models = sum(stats.seconds[part] for part in ("draft", "walk", "verify", "prefill"))
    ratios = [
        unit.tokens_per_second / base.tokens_per_second
        for unit, base in zip(row.units, plain.units, strict=True)
    ]
    ours = models > 0  # what transformers spends where cannot be told apart
    return {
        "name": row.decoder.name,
        "sampler": row.sampler,
        "batch": row.batch,
        "tau": round(stats.tau, 4),
        "tokens_per_second": round(row.tokens_per_second, 2),
        "speedup_over_plain": round(row.tokens_per_second / plain.tokens_per_second, 4),
        "median_speedup": round(median(ratios), 4),
        "acceptance_per_slot": [round(rate, 4) for rate in stats.acceptance_per_slot],
        "accepted_histogram": list(stats.histogram),
        "verified_per_committed": round(stats.verified_per_committed, 4) if ours else None,
        "greedy_identical": None,
        "near_ties": 0,
        "near_tie_cases": [],
        "seconds": {part: round(seconds, 4) for part, seconds in stats.seconds.items()}
        | {"total": round(wall, 4)},
        "outside_models": round(1 - models / wall, 4) if ours else None,
        "speed_model": speed_model(stats, wall, plain.stats, plain.seconds) if ours else None,
        "drafter_bytes": 0,
        **row.decoder.memory(),
        "prompts": sum(len(unit.prompts) for unit in row.units),
        "tokens": sum(len(output) for unit in row.units for output in unit.outputs),
    }


def divergences(target: Target, row: Row, plain: Row, prompts: list[dict[str, Any]]) -> list[Any]:
    """Where greedy outputs differ from those of plain decoding at the same batch size."""
    found = []
    for unit, base in zip(row.units, plain.units, strict=True):
        for place, tokens, expected in zip(unit.prompts, unit.outputs, base.outputs, strict=True):
            prompt = prompts[place]
            found.append(first_divergence(target, prompt["id"], prompt["prompt"], tokens, expected))
    return [one for one in found if one is not None]


def context_bucket(prompt: dict[str, Any]) -> str:
    """Prompt length in tokens, by powers of two from 64 on."""
    length, top = len(prompt["prompt"]), 64
    while length >= top:
        top *= 2
    return f"{top // 2 if top > 64 else 1}-{top - 1}"


GROUPS: dict[str, Callable[[dict[str, Any]], str]] = {
    "domain": lambda prompt: prompt["category"] or "",
    "context": context_bucket,
}


def groups(row: Row, plain: Row, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance by domain and by length of the prompt; speed, too, where a batch is one prompt."""
    by: dict[str, Any] = {}
    for kind, group_of in GROUPS.items():
        by[kind] = {}
        for name in sorted({group_of(prompt) for prompt in prompts}):
            members = {i for i, prompt in enumerate(prompts) if group_of(prompt) == name}
            stats = [
                stats
                for unit in row.units
                for place, stats in zip(unit.prompts, unit.stats, strict=True)
                if place in members
            ]
            if not stats:
                continue
            total = merged(stats)
            by[kind][name] = {
                "prompts": len(stats),
                "tau": round(total.tau, 4),
                "acceptance_per_slot": [round(rate, 4) for rate in total.acceptance_per_slot],
                "accepted_histogram": list(total.histogram),
            }
            if row.batch == 1:
                mine, theirs = (
                    speed([unit for unit in one.units if unit.prompts[0] in members])
                    for one in (row, plain)
                )
                by[kind][name] |= {
                    "tokens_per_second": round(mine, 2),
                    "speedup_over_plain": round(mine / theirs, 4),
                }
    return by
