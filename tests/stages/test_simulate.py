"""The simulation as a stage: of a finished run's traces, with the papers' curve or a given one."""

import json
from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.calibration.traces import Traces
from dspark_train.stages import simulate as stage
from tests.tiny_pipeline import Run, refused

FEW = (
    "stages=[simulate]",
    "simulate.policies=[fixed:0,fixed:4,auto]",
    "simulate.concurrency=[1,8]",
    "simulate.requests=30",
    "simulate.tokens=20",
)


def test_policies_side_by_side(tiny_run_finished: Run, tmp_path: Path) -> None:
    ended = tiny_run_finished(*FEW)
    assert ended.status == 0, ended
    folder = tmp_path / "run" / "simulate"
    rows = json.loads((folder / "report.json").read_text())["rows"]
    assert [(row["policy"], row["concurrency"]) for row in rows] == [
        (name, load) for load in (1, 8) for name in ("fixed:0", "fixed:4", "auto")
    ]
    assert rows[0]["tau"] == 1
    assert rows[1]["tau"] > 1
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "auto" in ended.out
    again = tiny_run_finished(*FEW, f"simulate.cost_table={folder / 'costs.json'}")
    assert again.status == 0, again
    assert json.loads((folder / "report.json").read_text())["rows"] == rows


def test_simulated_confidences_are_those_of_the_exported_head(
    tiny_run_finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traced ones with their shifts, once."""
    seen, real = [], stage.simulate

    def simulate(policy, costs, traces, **rest):
        seen.append(traces)
        return real(policy, costs, traces, **rest)

    monkeypatch.setattr(stage, "simulate", simulate)
    assert tiny_run_finished(*FEW).status == 0
    calibrate = Artifact.open(tmp_path / "run" / "calibrate")
    traced = Traces.load(calibrate.file("traces.safetensors"))
    assert calibrate.facts["shift"] != 0
    shifts = torch.tensor(calibrate.facts["slot_shifts"]) + calibrate.facts["shift"]
    assert torch.allclose(seen[0].logits, traced.logits + shifts, atol=1e-5)


def test_bad_input(tiny_run_finished: Run, tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text("what\n1\n")
    given = tiny_run_finished(*FEW, f"simulate.cost_table={tmp_path / 'costs.csv'}")
    refused(given, "costs.csv is no cost table")
