"""Cost of a training step: the reference loss beside the lean one, and time against anchors.

Every case runs in a process of its own. Losses take turns, round by round, so that a machine which
slows down slows both.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.stages.report import machine, print_table, write_report
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import device
from dspark_train.training.step_cost import SHAPES

LOSSES = ("reference", "lean")
ANCHORS_SHAPE = "smollm2_135m"


def inputs(config: Config) -> tuple[str, ...]:
    return ()


def settings(config: Config) -> dict[str, Any]:
    return {
        "bench_training": asdict(config.bench_training),
        "device": str(device(config)),
        "dtype": config.target.dtype,
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Measure, write report.json, print two tables."""
    b, where = config.bench_training, device(config)
    common = {"device": str(where), "threads": b.threads}
    losses = {shape: compare(config, shape, common) for shape in b.shapes}
    kinds = ["two_part", "flex"] if where.type == "cuda" else ["two_part"]
    by_anchors = {
        kind: measured(
            {"case": "anchors", "shape": ANCHORS_SHAPE, "attention": kind}
            | {"anchors": list(b.anchors), "rounds": b.rounds, **common}
        )
        for kind in (kinds if b.anchors else ())
    }
    used = b.threads or torch.get_num_threads()
    report = {
        "environment": {**machine(where), "dtype": config.target.dtype, "threads": used},
        "settings": settings(config),
        "shapes": {name: asdict(SHAPES[name]) for name in {*b.shapes, ANCHORS_SHAPE}},
        "losses": losses,
        "anchors": by_anchors,
    }
    writer.write("report.json", lambda path: write_report(path, report))
    show(report)
    ratios = {shape: row["lean_of_reference"] for shape, row in losses.items()}
    line = ", ".join(
        f"{shape}: lean loss {said(ratio['seconds'])} of the time and {said(ratio['peak_mb'])} of "
        "the memory"
        for shape, ratio in ratios.items()
    )
    return Outcome(counts={"shapes": len(losses)}, facts={"report": "report.json"}, line=line)


def compare(config: Config, shape: str, common: dict[str, Any]) -> dict[str, Any]:
    """Both losses at a shape, and their ratios where both ran.

    Raises:
        ValueError: they ran and do not agree.
    """
    b, dtype = config.bench_training, config.target.dtype
    found: dict[str, Any] = {loss: {"seconds": []} for loss in LOSSES}
    turns = [loss for _ in range(b.rounds) for loss in LOSSES]
    for loss in tqdm(turns, desc=shape, unit="process", mininterval=1):
        row = found[loss]
        if "out_of_memory" in row:
            continue
        case = {"case": "loss", "shape": shape, "loss": loss, "steps": b.steps, "dtype": dtype}
        result = measured({**case, "memory_mb": b.loss_memory_mb, **common})
        row |= {**result, "seconds": row["seconds"] + result.get("seconds", [])}
    for row in found.values():
        row["median_seconds"] = median(row["seconds"]) if row["seconds"] else None
    reference, lean = (found[loss] for loss in LOSSES)
    ratios = {"seconds": None, "peak_mb": None}
    if reference["seconds"] and lean["seconds"]:
        ratios["seconds"] = lean["median_seconds"] / reference["median_seconds"]
        if reference["peak_mb"]:
            ratios["peak_mb"] = lean["peak_mb"] / reference["peak_mb"]
        for key in ("loss", "gradient"):
            if abs(lean[key] - reference[key]) > 0.02 * abs(reference[key]):
                raise ValueError(
                    f"bench_training, {shape}: the {key} of the lean loss is {lean[key]}, that of "
                    f"the reference {reference[key]}: one of them is wrong, please report it"
                )
    return {**found, "lean_of_reference": ratios}


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a process of its own; a case that is killed ran out of memory.

    Raises:
        ValueError: it failed for another reason.
    """
    command = [sys.executable, "-m", "dspark_train.training.step_cost", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -9:
        return {"out_of_memory": "killed by the system"}
    last = (done.stderr.strip().splitlines() or ["nothing on its standard error"])[-1]
    raise ValueError(f"bench_training: the case {case} failed with {last}")


def said(ratio: float | None) -> str:
    """A ratio in words."""
    return "an unknown share" if ratio is None else f"{ratio:.2f}"


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    env = report["environment"]
    table = Table(title=f"loss · {env['dtype']} · {env['machine']} · {env['threads']} threads")
    for column in ("shape", "loss"):
        table.add_column(column)
    for column in ("seconds a step", "peak MB", "of the time", "of the memory"):
        table.add_column(column, justify="right")
    for shape, row in report["losses"].items():
        for loss in LOSSES:
            one, ratio = row[loss], row["lean_of_reference"]
            if "out_of_memory" in one:
                table.add_row(shape, loss, "out of memory", "", "", "")
                continue
            peak = "" if one["peak_mb"] is None else f"{one['peak_mb']:,.0f}"
            shares = [said(ratio[key]) if loss == "lean" else "" for key in ("seconds", "peak_mb")]
            table.add_row(shape, loss, f"{one['median_seconds']:.2f}", peak, *shares)
    print_table(table)
    for kind, row in report["anchors"].items():
        table = Table(title=f"two layers, forward and backward, {kind} attention")
        for column in ("anchors", "seconds", "× the first", "× if it grew with the square"):
            table.add_column(column, justify="right")
        first = next(iter(row.get("seconds", {"0": 0})))
        for count, seconds in row.get("seconds", {}).items():
            grown = seconds / row["seconds"][first]
            table.add_row(
                count, f"{seconds:.3f}", f"{grown:.2f}", f"{(int(count) / int(first)) ** 2:.0f}"
            )
        print_table(table)
