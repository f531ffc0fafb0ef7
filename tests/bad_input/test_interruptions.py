"""A full disk and Ctrl-C, in every stage: nothing finished is lost, the work continues."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.data import answers
from dspark_train.data.writer import FeatureWriter
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.engine import Engine
from dspark_train.training.module import DrafterTraining
from tests.tiny_pipeline import (
    STAGES,
    Run,
    arguments,
    fingerprints,
    refused,
)


@pytest.mark.parametrize("stage", ["rollout", "capture", "train", "export"])
def test_too_little_disk(
    tiny_run_finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = fingerprints(tmp_path / "run")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        ended = tiny_run_finished(f"stages=[{stage}]", f"force=[{stage}]")
    refused(ended, f"run/{stage}", "GB", "are free", "run_dir")
    assert fingerprints(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("stage", "written"),
    [
        ("rollout", 4),
        ("capture", 2),
        ("train", 2),
        ("calibrate", 2),
        ("export", 2),
        ("bench", 2),
    ],
)
def test_a_full_disk(
    tiny_run_finished: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    written: int,
) -> None:
    """The disk fills up in the middle of a stage; with space again the same command continues."""
    before = fingerprints(tmp_path / "run")
    pieces = ["rollout.shard_prompts=8"] if stage == "rollout" else []
    shutil.rmtree(tmp_path / "run" / stage)
    sync, calls = os.fsync, []

    def full(number: int) -> None:
        calls.append(number)
        if len(calls) > written:
            raise OSError(28, os.strerror(28))
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = tiny_run_finished(f"stages=[{stage}]", *pieces)
    refused(ended, "disk full while writing", "free some space", "same command")
    assert fingerprints(tmp_path / "run").keys() == before.keys() - {stage}
    assert tiny_run_finished(f"stages=[{stage}]", *pieces).status == 0


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


MIDDLES = {
    "rollout": (answers, "generate_batch"),
    "capture": (FeatureWriter, "add"),
    "train": (DrafterTraining, "training_step"),
    "calibrate": (Engine, "step"),
    "export": (SpeculativeDecoder, "generate"),
    "bench": (SpeculativeDecoder, "generate"),
}
PIECES = {"rollout": ["rollout.shard_prompts=8"], "train": ["train.micro_documents=4"]}


def outputs(run: Path, stage: str) -> dict[str, tuple[int, str]]:
    """Sizes and checksums of what a stage wrote, logs apart."""
    files = Artifact.open(run / stage).files
    return {name: entry for name, entry in files.items() if not name.startswith("logs/")}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c(
    tiny_run_finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Interrupted in every stage, then the same command: the result is that of a whole run."""
    run = tmp_path / "run"
    shutil.rmtree(run / stage)
    finished = fingerprints(run)
    given = [f"stages=[{stage}]", *PIECES.get(stage, [])]
    owner, name = MIDDLES[stage]
    inside, calls = getattr(owner, name), []

    def interrupted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            interrupt()
        return inside(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        ended = tiny_run_finished(*given)
    assert ended.status == 130
    assert "Traceback" not in ended.err
    assert ended.err.strip().endswith("the same command (without force) continues")
    assert fingerprints(run) == finished
    assert tiny_run_finished(*given).status == 0
    continued = outputs(run, stage)
    if stage != "bench":  # which measures time
        assert tiny_run_finished(*given, f"force=[{stage}]").status == 0
        assert outputs(run, stage) == continued


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rollout", "train"])
def test_ctrl_c_in_a_terminal(
    tiny_target_folder: Path, tiny_prompts: Path, tmp_path: Path, stage: str
) -> None:
    """The signal goes to a whole group of processes, loading workers among them."""
    given = arguments(
        tiny_target_folder,
        tiny_prompts,
        tmp_path / "run",
        f"stages=[{','.join(STAGES[: STAGES.index(stage) + 1])}]",
        "train.workers=2",
        "train.epochs=40",
        "rollout.batch_size=1",
        "rollout.shard_prompts=4",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_train", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = b""
    while f"{stage}: ".encode() not in said:
        piece = process.stdout.read1()
        assert piece, said.decode()
        said += piece
    os.killpg(process.pid, signal.SIGINT)
    said += process.communicate(timeout=120)[0]
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    assert said.strip().endswith(b"the same command (without force) continues")
