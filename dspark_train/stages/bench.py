"""checkpoint vs baselines -> report: the same held-out prompts, interleaved in one run.

Every batch of prompts is decoded by every contestant before the next one comes, and the order of
the contestants rotates, so that a machine which slows down slows all of them. With several rounds
an answer takes the median of its times. Where shapes are recorded or compiled when they are first
met, everything is decoded once before.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.disk import sha256_file
from dspark_train.formats import load_config
from dspark_train.stages.bench_decoders import Decoder, make_decoders
from dspark_train.stages.bench_plot import write_plot
from dspark_train.stages.bench_prompts import bench_prompts
from dspark_train.stages.bench_rows import Row, Unit, summarise
from dspark_train.stages.bench_tables import show
from dspark_train.stages.bench_trees import tree_gains
from dspark_train.stages.cards import write_cards
from dspark_train.stages.export import push_card
from dspark_train.stages.report import environment, write_report
from dspark_train.stages.rollout import template_sha
from dspark_train.stages.round_picture import draw_round, record_round
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import load_target, require_same_target, target_settings

WARM_UP_TOKENS = 16
PICTURED_TOKENS = 32


def inputs(config: Config) -> tuple[str, ...]:
    own_prompts = not (config.bench.sources and config.checkpoint)
    return ("rollout",) * own_prompts + ("export",) * (config.checkpoint is None)


def settings(config: Config) -> dict[str, Any]:
    b = config.bench
    given = {"checkpoint": config.checkpoint, "dflash": b.dflash}
    weights = {
        name: folder and Path(folder) / "model.safetensors" for name, folder in given.items()
    }
    files = {**weights, **{name: Path(source) for name, source in b.sources.items()}}
    return {
        "target": target_settings(config),
        "bench": asdict(b),
        "checkpoint": config.checkpoint,
        "template": config.prompts.template,
        "sha256": {
            name: sha256_file(path) for name, path in files.items() if path and path.is_file()
        },
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Measure, write report.json, report.png and round.png, print the tables."""
    b, target = config.bench, load_target(config)
    checkpoint = config.checkpoint or str(inputs["export"].folder("checkpoint"))
    if "rollout" in inputs:
        rollout = inputs["rollout"]
        require_same_target(target, rollout.facts["target"], str(rollout.directory))
    for folder in filter(None, (checkpoint, b.dflash)):
        require_same_target(target, load_config(folder).target, folder)
    prompts = bench_prompts(config, target, inputs)
    if max(b.batches) > len(prompts):
        raise ValueError(
            f"bench.batches={b.batches}: expected at most the {len(prompts)} prompts that there "
            f"are; raise bench.prompts={b.prompts}, or give more prompts"
        )
    threads = torch.get_num_threads()
    if b.threads:
        torch.set_num_threads(b.threads)
    try:
        decoders = make_decoders(config, target, checkpoint)
        rows = measure(config, decoders, [row["prompt"] for row in prompts])
        used = {"threads": torch.get_num_threads()}
        drafted = [d for d in decoders if d.name in ("dflash", "dspark")]
        if drafted:
            shortest = min((row["prompt"] for row in prompts), key=len)
            spans = record_round(drafted[-1].ours, shortest, PICTURED_TOKENS)
            writer.write("round.png", lambda path: draw_round(path, spans))
    finally:
        torch.set_num_threads(threads)
    entries, unexplained = summarise(target, rows, prompts)
    report = {
        "environment": {**environment(target), **used},
        "settings": {
            **settings(config),
            "checkpoint": checkpoint,
            "prompt_ids": [row["id"] for row in prompts],
            "template_sha256": template_sha(target),
        },
        "rows": entries,
    }
    if gains := tree_gains(entries):
        report["trees"] = gains
    writer.write("report.json", lambda path: write_report(path, report))
    writer.write("report.png", lambda path: write_plot(path, report))
    if drafted and not config.checkpoint:
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


def measure(config: Config, decoders: list[Decoder], prompts: list[list[int]]) -> list[Row]:
    """Decode all prompts with all contestants, in batches of all sizes, under all samplers."""
    b = config.bench
    for decoder in decoders:  # caches, kernels and allocators warm up
        decoder.decode([prompts[0][:WARM_UP_TOKENS]], 0.0, [b.seed])
    rows = [
        Row(decoder, temperature, batch)
        for batch in b.batches
        for temperature in b.temperatures
        for decoder in decoders
        if batch == 1 or decoder.batches
    ]
    compiled = config.target.compile or "transformers_compiled" in b.decoders
    turns = range(-int(compiled or config.target.graphs), b.rounds)
    total = len(turns) * sum(len(prompts) // row.batch for row in rows)
    with tqdm(total=total, desc="bench", unit="answer", mininterval=1) as bar:
        for turn in turns:
            for batch in b.batches:
                same = [row for row in rows if row.batch == batch]
                for number in range(len(prompts) // batch):
                    chosen = range(number * batch, (number + 1) * batch)
                    for i in range(len(same)):
                        row = same[(i + number + turn) % len(same)]
                        begin = perf_counter()
                        answers = row.decoder.decode(
                            [prompts[j] for j in chosen],
                            row.temperature,
                            [b.seed + j for j in chosen],
                        )
                        seconds = perf_counter() - begin
                        if turn == 0:
                            row.units.append(Unit(list(chosen)))
                        if turn >= 0:
                            row.units[number].add(seconds, answers)
                        bar.update()
    return rows
