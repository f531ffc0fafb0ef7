"""Runs of the whole pipeline on the tiny target, in this process, and what they print."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_train.__main__ import main
from tests import tiny_language

PROMPTS = 60
SETTINGS = (
    "target.dtype=float32",
    "prompts.calibration=0.15",
    "prompts.held_out=0.15",
    "rollout.max_new_tokens=32",
    "capture.num_taps=2",
    "capture.dtype=float32",
    "drafter.num_hidden_layers=1",
    "drafter.block_size=4",
    "drafter.markov_rank=16",
    "train.epochs=2",
    "train.anchors=16",
    "train.precision=32-true",
    "calibrate.prompts=4",
    "calibrate.max_new_tokens=16",
    "export.dtype=float32",
    "bench.prompts=2",
    "bench.max_new_tokens=8",
    "bench.temperatures=[0.0]",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error, without the progress bars before it."""
        return self.err[self.err.find("error: ") :].strip() if "error: " in self.err else ""


def write_prompts(path: Path, count: int = PROMPTS) -> Path:
    """A JSONL file of requests in the tiny language."""
    rows = [json.dumps({"messages": m}) for m in tiny_language.prompts(count)]
    path.write_text("\n".join(rows) + "\n")
    return path


def arguments(target: Path, prompts: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of a run, without the name of the program."""
    return [
        f"target.name={target}",
        f"prompts.source={prompts}",
        f"run_dir={run_dir}",
        *SETTINGS,
        *overrides,
    ]


def run_main(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: list[str]
) -> Ended:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["dspark_train", *given])
    capfd.readouterr()
    status = 0
    try:
        main()
    except SystemExit as exit_:
        # as the interpreter does with a message
        status = exit_.code if isinstance(exit_.code, int) else 1
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    captured = capfd.readouterr()
    return Ended(status, captured.out, captured.err)


Run = Callable[..., Ended]
