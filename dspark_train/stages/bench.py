"""checkpoint vs baselines -> report: the same held-out prompts, interleaved in one run.

Every prompt is decoded by every contestant before the next prompt comes, and the order of the
contestants rotates, so that a machine which slows down slows all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.stats import DecodingStats
from dspark_train.disk import sha256_file
from dspark_train.formats import load_config
from dspark_train.stages.cards import write_cards
from dspark_train.stages.divergence import Divergence, first_divergence
from dspark_train.stages.export import push_card
from dspark_train.stages.report import environment, show, write_plot, write_report
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings
from dspark_train.target import Target
from dspark_train.target.cpu import weight_bytes

# what a contestant makes of (prompt, temperature, seed)
Decode = Callable[[list[int], float, int], tuple[list[int], DecodingStats]]
WARM_UP_TOKENS = 16


@dataclass
class Row:
    """Sums of one contestant under one sampler."""

    name: str
    temperature: float
    stats: DecodingStats = field(default_factory=DecodingStats)
    seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens / self.seconds


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout",) if config.checkpoint else ("rollout", "export")


def settings(config: Config) -> dict[str, Any]:
    given = config.checkpoint and Path(config.checkpoint) / "model.safetensors"
    return {
        "target": target_settings(config),
        "bench": asdict(config.bench),
        "checkpoint": config.checkpoint,
        "checkpoint_sha256": sha256_file(given) if given and given.is_file() else None,
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Measure, write report.json and report.png, print the table."""
    b, rollout = config.bench, inputs["rollout"]
    checkpoint = config.checkpoint
    if not checkpoint:
        checkpoint = str(inputs["export"].folder("checkpoint"))
    made_for = load_config(checkpoint).target
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    require_same_target(target, made_for, checkpoint)
    threads = torch.get_num_threads()
    if b.threads:
        torch.set_num_threads(b.threads)
    try:
        prompts = split_prompts(rollout, "held_out", b.prompts)
        contestants, drafter_bytes = make_contestants(target, checkpoint, b.max_new_tokens)
        # the baseline is transformers as it is, without what `Target.pack` gives to ours
        stock = load_target(config, stock=True) if target.packed else target
        contestants["transformers"] = transformers_generate(stock, b.max_new_tokens)
        rows = measure(config, contestants, [row["prompt"] for row in prompts])
        used = {"threads": torch.get_num_threads()}
    finally:
        torch.set_num_threads(threads)
    entries, unexplained = summarise(target, rows, prompts, drafter_bytes)
    report = {
        "environment": {**environment(target), **used},
        "settings": {
            **settings(config),
            "checkpoint": checkpoint,
            "prompt_ids": [row["id"] for row in prompts],
            "template": rollout.facts["template"],
            "template_sha256": rollout.facts["template_sha256"],
        },
        "rows": entries,
    }
    writer.write("report.json", lambda path: write_report(path, report))
    writer.write("report.png", lambda path: write_plot(path, report))
    if not config.checkpoint:
        own = write_cards(writer, inputs["export"], report)
        if config.export.push_to_hub:
            push_card(writer.path(own), config.export.push_to_hub)
    show(report)
    if unexplained:
        raise ValueError(
            f"greedy output is not that of plain decoding, and no near tie explains it: "
            f"{unexplained}; this is a fault in decoding, please report it with {writer.directory}"
        )
    best = max(entries, key=lambda entry: entry["speedup_over_plain"])
    return Outcome(
        counts={"prompts": len(prompts), "rows": len(entries)},
        facts={"report": "report.json"},
        line=f"best {best['name']} ({best['sampler']}): {best['speedup_over_plain']:.2f} x plain",
    )


def make_contestants(
    target: Target, checkpoint: str, max_new_tokens: int
) -> tuple[dict[str, Decode], int]:
    """Everything that decodes, by the name of its rows, and the drafter's bytes."""
    proposers = {
        "plain": "plain",
        "lookup": "lookup",
        "dflash": "drafter-no-heads",
        "dspark": "drafter",
    }
    contestants: dict[str, Decode] = {}
    drafter_bytes = 0
    for name, proposer in proposers.items():
        decoder = SpeculativeDecoder.from_pretrained(checkpoint, target, proposer=proposer)
        contestants[name] = ours(decoder, max_new_tokens)
        if name == "dspark":
            drafter = decoder.proposer.drafter
            drafter_bytes = weight_bytes(drafter)
            if drafter.markov_head is None:
                del contestants["dspark"]  # without heads both rows would be the same
    return contestants, drafter_bytes


def ours(decoder: SpeculativeDecoder, max_new_tokens: int) -> Decode:
    """Our decoder as a contestant."""

    def decode(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], DecodingStats]:
        result = decoder.generate(prompt, max_new_tokens, temperature=temperature, seed=seed)
        return result.tokens, result.stats

    return decode


def transformers_generate(target: Target, max_new_tokens: int) -> Decode:
    """`generate` of transformers, plain, as a contestant."""

    def decode(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], DecodingStats]:
        torch.manual_seed(seed)
        sampler = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([prompt], device=target.device)
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
            **(sampler if temperature > 0 else {"do_sample": False}),
        )
        tokens = output[0, len(prompt) :].tolist()
        # one token a step: the first comes from the prefill, as in our statistics
        steps = len(tokens) - 1
        stats = DecodingStats(requests=1, rounds=steps, tokens=len(tokens), committed=steps)
        stats.histogram = [steps]
        return tokens, stats

    return decode


def measure(config: Config, contestants: dict[str, Decode], prompts: list[list[int]]) -> list[Row]:
    """Decode all prompts with all contestants under all samplers."""
    b = config.bench
    for decode in contestants.values():  # caches, kernels and allocators warm up
        decode(prompts[0][:WARM_UP_TOKENS], 0.0, b.seed)
    rows = [Row(name, t) for t in b.temperatures for name in contestants]
    with tqdm(total=len(rows) * len(prompts), desc="bench", unit="answer", mininterval=1) as bar:
        for turn, prompt in enumerate(prompts):
            for i in range(len(rows)):
                row = rows[(i + turn) % len(rows)]
                begin = perf_counter()
                tokens, stats = contestants[row.name](prompt, row.temperature, b.seed + turn)
                row.seconds += perf_counter() - begin
                row.stats.merge(stats)
                row.outputs.append(tokens)
                bar.update()
    return rows


def summarise(
    target: Target, rows: list[Row], prompts: list[dict[str, Any]], drafter_bytes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The report's rows, and greedy divergences that no near tie explains."""
    plain = {row.temperature: row for row in rows if row.name == "plain"}
    entries, unexplained = [], []
    for row in rows:
        divergences: list[Divergence] = []
        if row.temperature == 0:
            expected = plain[0.0].outputs
            found = [
                first_divergence(target, prompt["id"], prompt["prompt"], tokens, other)
                for prompt, tokens, other in zip(prompts, row.outputs, expected, strict=True)
            ]
            divergences = [d for d in found if d is not None]
            unexplained += [f"{row.name}: {d}" for d in divergences if not d.near_tie]
        seconds = row.stats.seconds
        entries.append(
            {
                "name": row.name,
                "sampler": "greedy" if row.temperature == 0 else f"temperature {row.temperature}",
                "tau": round(row.stats.tau, 4),
                "tokens_per_second": round(row.tokens_per_second, 2),
                "speedup_over_plain": round(
                    row.tokens_per_second / plain[row.temperature].tokens_per_second, 4
                ),
                "acceptance_per_slot": [round(a, 4) for a in row.stats.acceptance_per_slot],
                "accepted_histogram": list(row.stats.histogram),
                "verified_per_committed": round(row.stats.verified_per_committed, 4),
                "greedy_identical": not divergences if row.temperature == 0 else None,
                "near_ties": sum(d.near_tie for d in divergences),
                "near_tie_cases": [asdict(d) for d in divergences],
                "seconds": {key: round(value, 4) for key, value in seconds.items()}
                | {"total": round(row.seconds, 4)},
                "drafter_bytes": drafter_bytes if row.name in ("dflash", "dspark") else 0,
                "prompts": len(row.outputs),
                "tokens": row.stats.tokens,
            }
        )
    return entries, unexplained
