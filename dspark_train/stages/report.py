"""What reports of benchmarks share: where it ran, JSON, tables on the terminal."""

import json
import platform
from collections.abc import Sequence
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


def case(row: dict[str, Any]) -> str:
    """The sampler of a row, and its batch size where that is not 1."""
    return row["sampler"] if row["batch"] == 1 else f"{row['sampler']}, batch {row['batch']}"


def table_of(
    title: str, left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()
) -> Table:
    """An empty table with columns for words, for numbers, and for words."""
    table = Table(title=title)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    for column in last:
        table.add_column(column)
    return table


def print_table(table: Table) -> None:
    """Print a table, wide enough for a log file too; a terminal wraps by itself."""
    Console(width=None if Console().is_terminal else 150).print(table)
