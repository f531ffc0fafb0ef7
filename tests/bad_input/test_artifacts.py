"""Artifacts of a run that are damaged, missing or of something else."""

import shutil
from pathlib import Path

import pytest

from tests.tiny_pipeline import (
    STAGES,
    Run,
    changed_target,
    fingerprints,
    other_weights,
    refused,
)


@pytest.mark.parametrize(
    ("stage", "file", "reader"),
    [
        ("rollout", "rollouts-00000.jsonl", "capture"),
        ("rollout", "prompts.jsonl", "calibrate"),
        ("capture", "features-00000.safetensors", "train"),
        ("train", "drafter/model.safetensors", "calibrate"),
        ("train", "drafter/config.json", "export"),
        ("export", "checkpoint/model.safetensors", "bench"),
        ("calibrate", "manifest.json", "export"),
    ],
)
@pytest.mark.parametrize("change", ["truncated", "flipped", "missing"])
def test_damaged_artifacts(
    tiny_run_finished: Run, tmp_path: Path, stage: str, file: str, reader: str, change: str
) -> None:
    path = tmp_path / "run" / stage / file
    content = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        # the last byte is data of a tensor, or the end of JSON
        path.write_bytes(content[:-9] + (b"" if change == "truncated" else b"\x00\xff" * 4 + b"?"))
    refused(tiny_run_finished(f"stages=[{reader}]", f"force=[{reader}]"), f"run/{stage}", file)
    if change == "truncated" and file != "manifest.json":
        # what the message advises helps
        assert tiny_run_finished(f"stages=[{stage},{reader}]", f"force=[{stage}]").status == 0


def test_a_stage_without_what_it_reads(tiny_run: Run, tmp_path: Path) -> None:
    for stage in STAGES[1:]:
        refused(tiny_run(f"stages=[{stage}]"), f"stage {stage} reads the stage", "must run first")
    assert not (tmp_path / "run").exists()


def test_an_artifact_of_another_stage(tiny_run_finished: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "capture")
    shutil.copytree(run / "rollout", run / "capture")
    refused(tiny_run_finished("stages=[train]"), "run/capture was written by the stage rollout")


def test_artifacts_of_another_target(
    tiny_run_finished: Run, tiny_target_folder: Path, tmp_path: Path
) -> None:
    path = changed_target(tiny_target_folder, tmp_path, other_weights)
    for stage in ("capture", "train", "calibrate", "export", "bench"):
        ended = tiny_run_finished(f"stages=[{stage}]", f"target.name={path}", f"force=[{stage}]")
        refused(ended, "was made with target", "other_target", "use that target")
    assert len(fingerprints(tmp_path / "run")) == len(STAGES)
