"""Runs of the whole pipeline on the tiny target, in this process, and what they print."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_train.__main__ import main
from dspark_train.artifacts import Artifact, manifest_sha
from dspark_train.aside import MANIFEST
from dspark_train.disk import sha256_file
from dspark_train.target import Target
from tests import tiny_language

PROMPTS = 60
# of the schedule "joint"
STAGES = ("rollout", "capture", "train", "calibrate", "export", "bench")
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


def refused(ended: Ended, *parts: str, lines: int = 2) -> None:
    """Assert that a command ended with one short message that has all the parts."""
    assert ended.status == 1, ended
    assert "Traceback" not in ended.err
    assert len(ended.message.splitlines()) <= lines, ended.message
    for part in parts:
        assert part in ended.message, ended.message


def fingerprints(run: Path) -> dict[str, str]:
    """What is finished in a run."""
    return {
        name: Artifact.open(run / name).fingerprint
        for name in STAGES
        if (run / name / "manifest.json").exists()
    }


def changed_target(folder: Path, tmp_path: Path, change: Callable[[Target], None]) -> Path:
    """A copy of a target, changed, in `tmp_path/other_target`."""
    target = Target.load(str(folder), dtype="float32", pack=False)
    change(target)
    path = tmp_path / "other_target"
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


def other_weights(target: Target) -> None:
    """Same sizes, other numbers."""
    for parameter in target.model.parameters():
        parameter.data.mul_(1.1)


def rewrite_manifest(directory: Path, name: str) -> None:
    """Make a manifest agree with a file that was changed."""
    path = directory / MANIFEST
    manifest, file = json.loads(path.read_text()), directory / name
    manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    manifest["manifest_sha256"] = manifest_sha(manifest)
    path.write_text(json.dumps(manifest))
