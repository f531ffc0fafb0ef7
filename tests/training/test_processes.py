"""Several processes: the same steps and weights as one, however they are started."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from dspark_train.artifacts import Artifact
from tests.processes import free_port
from tests.tiny_pipeline import arguments

STAGES = "rollout", "capture"
# 34 training documents in steps of 7: the last one of an epoch has 6, so a rank may have few
TRAIN = (
    "train.epochs=2",
    "train.batch_documents=7",
    "train.validation=0.2",
    "train.lr=3e-3",
    "train.keep=last",
)
Weights = dict[str, torch.Tensor]
ONE = (sys.executable, "-m", "dspark_train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--multi_gpu", "--num_processes", "2"),
)


class Runs:
    """Runs the stage train on the same features, each in a folder of its own below `tmp_path`."""

    def __init__(self, finished: Path, target: Path, prompts: Path, tmp_path: Path) -> None:
        self.finished, self.target, self.prompts = finished, target, prompts
        self.tmp_path, self.status = tmp_path, 0

    def start(
        self, name: str, launcher: Sequence[str], *overrides: str, stages: str = "train"
    ) -> subprocess.Popen[str]:
        for stage in STAGES:
            folder = self.tmp_path / name / stage
            if not folder.exists():
                shutil.copytree(self.finished / stage, folder)
        given = arguments(self.target, self.prompts, self.tmp_path / name, *TRAIN, *overrides)
        command = list(launcher)
        if not command[-1].endswith(("dspark_train", ".py")):
            port = ["--main_process_port" if "accelerate" in command[2] else "--master_port"]
            command += [*port, str(free_port()), "-m", "dspark_train"]
        flags = [item for item in given if item.startswith("-")]
        given = [item for item in given if item not in flags]
        return subprocess.Popen(
            [*command, *flags, f"stages=[{stages}]", *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.tmp_path,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, name: str, launcher: Sequence[str], *overrides: str, **more: str) -> str:
        process = self.start(name, launcher, *overrides, **more)
        try:
            said, _ = process.communicate(timeout=200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        self.status = process.returncode
        return said

    def weights(self, name: str) -> Weights:
        return load_file(self.tmp_path / name / "train" / "drafter" / "model.safetensors")

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.tmp_path / name / "train" / "logs" / "metrics.csv").open() as file:
            return [row for row in csv.DictReader(file) if row["train/loss"]]


def assert_alike(run: Runs, one: str, other: str) -> None:
    ours, theirs = run.rows(one), run.rows(other)
    assert len(ours) == len(theirs) == Artifact.open(run.tmp_path / one / "train").counts["steps"]
    for key in ("train/loss", "train/tau", "train/gradient_norm", "train/confidence_error_1"):
        expected = torch.tensor([float(row[key]) for row in ours])
        found = torch.tensor([float(row[key]) for row in theirs])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [row["lr"] for row in ours] == [row["lr"] for row in theirs]
    expected, found = run.weights(one), run.weights(other)
    assert expected.keys() == found.keys()
    # steps of Adam are signs where gradients are nearly nothing, so the rest is left to the norm
    for name, tensor in expected.items():
        distance = (found[name] - tensor).norm() / tensor.norm()
        assert distance < 1e-3, (name, distance)


@pytest.fixture(scope="module")
def alone(
    finished_run: Path,
    tiny_target_folder: Path,
    tiny_prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """A run of one process, to which the others are compared."""
    folder = tmp_path_factory.mktemp("processes")
    run = Runs(finished_run, tiny_target_folder, tiny_prompts, folder)
    said = run("one", ONE)
    assert run.status == 0, said
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "overrides"),
    [
        (ONE, ("train.micro_documents=1",)),
        (TORCHRUN, ()),
        (TORCHRUN, ("train.micro_documents=2", "train.workers=1")),
        (ACCELERATE, ("train.micro_documents=2",)),
        (ONE, ("+train.trainer.devices=2",)),
        (TORCHRUN, ("train.strategy=fsdp2",)),
        (ONE, ("+train.trainer.devices=2", "train.strategy=fsdp2", "train.micro_documents=2")),
    ],
    ids=lambda given: Path(given[0]).stem + given[-1] if given else "ddp",
)
def test_as_one_process(alone: Runs, launcher: Sequence[str], overrides: Sequence[str]) -> None:
    """One of 7 documents, 1 x 7 and 2 ranks x 4 micro-batches: the same losses and weights."""
    shutil.rmtree(alone.tmp_path / "other", ignore_errors=True)
    said = alone("other", launcher, *overrides)
    assert alone.status == 0, said
    assert "Traceback" not in said
    assert said.count("10 steps over 43 documents") == 1
    assert_alike(alone, "one", "other")


WRONG = """
from dspark_train.__main__ import main
from dspark_train.training.sums import Sums
Sums.exchange = lambda self, *flags: list(flags)
main()
"""


@pytest.mark.slow
def test_a_planted_wrong_denominator_is_seen(alone: Runs) -> None:
    """Power: every rank divides by the weights of its own documents."""
    script = alone.tmp_path / "wrong.py"
    script.write_text(WRONG)
    said = alone("wrong", (*TORCHRUN, "--master_port", str(free_port()), str(script)))
    assert alone.status == 0, said
    with pytest.raises(AssertionError):
        assert_alike(alone, "one", "wrong")


@pytest.mark.slow
def test_a_rank_without_a_supervised_token(alone: Runs) -> None:
    """One document a step: rank 1 never has any, and neither hangs nor spoils the sums."""
    given = ("train.batch_documents=1", "train.epochs=1")
    for name, launcher in (("single", ONE), ("idle", TORCHRUN)):
        said = alone(name, launcher, *given)
        assert alone.status == 0, said
    assert_alike(alone, "single", "idle")


def killed(run: Runs, name: str, launcher: Sequence[str], saves: int, *overrides: str) -> None:
    """Start a run that saves after every step, and kill it -9 after so many checkpoints."""
    shutil.rmtree(run.tmp_path / name, ignore_errors=True)
    process = run.start(name, launcher, "train.checkpoint_minutes=1e-9", *overrides)
    path, seen = run.tmp_path / name / "train" / "scratch" / "last.ckpt", set()
    while len(seen) < saves:
        assert process.poll() is None, process.communicate()[0]
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.002)
    # a launcher gives every process a session of its own
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.communicate()
    assert not (run.tmp_path / name / "train" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "workers"), [(1, 0), (3, 2), (6, 0)])
def test_killed_and_resumed_is_as_never_killed(alone: Runs, saves: int, workers: int) -> None:
    killed(alone, "killed", ONE, saves, f"train.workers={workers}")
    said = alone("killed", ONE, f"train.workers={workers}")
    assert alone.status == 0, said
    expected = alone.weights("one")
    assert all(torch.equal(t, expected[name]) for name, t in alone.weights("killed").items())
    for ours, theirs in zip(alone.rows("one"), alone.rows("killed"), strict=True):
        for key in ("step", "lr", "train/loss", "train/anchors", "train/gradient_norm"):
            assert ours[key] == theirs[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "overrides"),
    [
        (TORCHRUN, ONE, ()),
        (ONE, TORCHRUN, ("train.strategy=fsdp2",)),
        (TORCHRUN, TORCHRUN, ("train.strategy=fsdp2", "train.ema=0.5")),
        (ONE, TORCHRUN, ("train.strategy=fsdp2", "train.optimiser=muon")),
    ],
    ids=["two to one", "one to two of fsdp2", "fsdp2", "muon under fsdp2"],
)
def test_resumed_on_other_ranks(
    alone: Runs, before: Sequence[str], after: Sequence[str], overrides: Sequence[str]
) -> None:
    expected = "one"
    if overrides[1:]:
        expected = "whole"
        shutil.rmtree(alone.tmp_path / expected, ignore_errors=True)
        shutil.rmtree(alone.tmp_path / "moved", ignore_errors=True)
        said = alone(expected, ONE, *overrides)
        assert alone.status == 0, said
    killed(alone, "moved", before, 3, *overrides)
    said = alone("moved", after, *overrides)
    assert alone.status == 0, said
    assert_alike(alone, expected, "moved")


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_sigterm_with_workers_saves_and_ends(alone: Runs, group: bool) -> None:
    shutil.rmtree(alone.tmp_path / "ended", ignore_errors=True)
    process = alone.start("ended", ONE, "train.workers=2", "train.epochs=200")
    said = b""
    while not re.search(rb" [1-9]\d*/1000", said):
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, said
        said += piece
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert rest.strip().endswith("the same command (without force) continues")
    assert (alone.tmp_path / "ended" / "train" / "scratch" / "last.ckpt").exists()


@pytest.mark.slow
def test_two_runs_in_one_folder(alone: Runs) -> None:
    process = alone.start("shared", ONE, "train.epochs=500")
    while not (alone.tmp_path / "shared" / "train" / "logs").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    said = alone("shared", ONE)
    assert alone.status == 1
    assert f"shared is being worked on by another run (process {process.pid})" in said
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    said = alone("shared", ONE)  # nobody has to remove a lock
    assert alone.status == 0, said


@pytest.mark.slow
def test_sweep_of_two_processes_makes_two_folders(alone: Runs) -> None:
    """Fault 50: two jobs x two processes, and what Lightning starts does not sweep again."""
    for number, launcher in enumerate([TORCHRUN, ONE]):
        place = alone.tmp_path / f"sweep{number}"
        for job in "ab":
            for stage in STAGES:
                shutil.copytree(alone.finished / stage, place / job / stage)
        devices = ("+train.trainer.devices=2",) if launcher is ONE else ()
        said = alone(
            f"sweep{number}/unused",
            launcher,
            "-m",
            "name=a,b",
            f"run_dir={place}/${{name}}",
            *devices,
        )
        assert alone.status == 0, said
        assert said.count("10 steps over 43 documents") == 2
        assert sorted(path.name for path in place.iterdir()) == ["a", "b", "unused"]
        for job in "ab":
            found = {path.name for path in (place / job).iterdir()}
            assert found == {".lock", "rollout", "capture", "train"}
    assert not [path for path in alone.tmp_path.iterdir() if path.name.startswith("multirun")]


@pytest.mark.slow
def test_launcher_and_trainer_disagree(alone: Runs) -> None:
    """Fault 51."""
    said = alone("other", TORCHRUN, "+train.trainer.devices=4")
    assert alone.status != 0
    assert "train.trainer.devices=4" in said
    assert "WORLD_SIZE=2" in said
    assert said.count("error: settings:") == 1
