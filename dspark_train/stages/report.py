"""A benchmark's report: JSON, a table on the terminal, a plot."""

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import dspark_train
from dspark_train.target import Target


def processor() -> str:
    """Name of the processor, as the operating system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(target: Target) -> dict[str, Any]:
    """What a reader needs to know to compare numbers."""
    return {
        **machine(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target.fingerprint(),
        "attention": target.model.config._attn_implementation,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What computed, and with which releases."""
    cuda = device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(device) if cuda else processor(),
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dspark_train": dspark_train.__version__,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write report.json."""
    path.write_text(json.dumps(report, indent=1))


def show(report: dict[str, Any]) -> None:
    """Print the rows as a table."""
    first, env = report["rows"][0], report["environment"]
    table = Table(
        title=f"{first['prompts']} held-out prompts · {env['target']['name']} · {env['dtype']} · "
        f"{env['machine']} · {env['threads']} threads"
    )
    for column in ("sampler", "decoder"):
        table.add_column(column)
    for column in ("τ", "tokens/s", "x plain", "verified / token", "draft / verify / rest"):
        table.add_column(column, justify="right")
    table.add_column("accepted per slot")
    table.add_column("greedy output")
    for row in report["rows"]:
        parts = [row["seconds"][key] for key in ("draft", "verify", "other")]
        total = sum(parts)
        same = "" if row["greedy_identical"] is None else "identical"
        if row["greedy_identical"] is False:
            ties = row["near_ties"]
            same = f"{ties} near tie{'s' if ties > 1 else ''}"
        table.add_row(
            row["sampler"],
            row["name"],
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_over_plain']:.2f}",
            f"{row['verified_per_committed']:.2f}",
            " / ".join(f"{100 * p / total:.0f}" for p in parts) + " %" if total else "",
            " ".join(f"{a:.2f}" for a in row["acceptance_per_slot"]),
            same,
        )
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table, wide enough for a log file too; a terminal wraps by itself."""
    Console(width=None if Console().is_terminal else 150).print(table)


def write_plot(path: Path, report: dict[str, Any]) -> None:
    """Speed-up and acceptance per slot, one panel each per sampler."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samplers = list(dict.fromkeys(row["sampler"] for row in report["rows"]))
    figure = Figure(figsize=(10, 3.2 * len(samplers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(samplers), 2, squeeze=False)
    for (speed, slots), sampler in zip(axes, samplers, strict=True):
        rows = [row for row in report["rows"] if row["sampler"] == sampler]
        bars = speed.barh(
            [row["name"] for row in rows], [row["speedup_over_plain"] for row in rows]
        )
        speed.bar_label(bars, [f"{row['tokens_per_second']:.0f} tok/s" for row in rows], padding=3)
        speed.axvline(1.0, color="grey", linewidth=1)
        speed.margins(x=0.2)
        speed.invert_yaxis()
        speed.set(title=sampler, xlabel="speed-up over plain decoding")
        for row in rows:
            if row["acceptance_per_slot"]:
                rates = row["acceptance_per_slot"]
                slots.plot(
                    range(len(rates)), rates, "o-", label=f"{row['name']}, τ {row['tau']:.2f}"
                )
        slots.set(
            title=sampler, xlabel="slot", ylabel="acceptance, given the earlier slots", ylim=(0, 1)
        )
        slots.legend()
    figure.savefig(path, format="png", dpi=120)
